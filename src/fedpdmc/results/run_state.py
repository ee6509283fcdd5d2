"""The state of a run between two blocks, as data: all that is needed to continue except for the sites and their records."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedpdmc.errors import InputError


class RunState(NamedTuple):
    """Facts that JSON can hold, and arrays by name.

    An archive and the store of a network study both hold one. `fedpdmc.sampling.run_state_arrays` says what the arrays are.
    """

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def cannot_go_on(settings: dict[str, Any]) -> InputError:
    """Why a posterior has no run, and what to do."""
    if settings.get("exact") is False:
        return InputError(
            "extend",
            "a private answer in one shot, which has no chains",
            "Sample again, with method='exact' or more budget.",
        )
    if "contract" in settings:
        return InputError(
            "extend",
            f"a saved posterior of study {settings['study']!r}, whose sites are on a network",
            "The study continues from the coordinator's store: fedpdmc.sample(fedpdmc.connect(contract, ..., store=folder), "
            "ess=...), or `fedpdmc coordinator study.toml --store folder`.",
        )
    return InputError(
        "extend",
        "a saved posterior without the state of its run",
        "Restore the archive from a whole copy, or sample again and save with this version of fedpdmc.",
    )
