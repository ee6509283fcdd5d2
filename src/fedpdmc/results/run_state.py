"""Where a run stands between two blocks, as data: what it takes to go on, but for the sites and their records."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class RunState(NamedTuple):
    """Facts that JSON can hold, and arrays by name.

    An archive and the store of a network study both hold one. `fedpdmc.sampling.run_position` says what the arrays are.
    """

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]
