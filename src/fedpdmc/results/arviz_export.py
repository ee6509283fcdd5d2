"""A posterior as an ArviZ ``InferenceData``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpdmc.console.warnings import import_arviz
from fedpdmc.results.diagnostics import energy
from fedpdmc.validation import integer

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior

# Chains that ArviZ is given by default.
ARVIZ_CHAINS = 4


def to_arviz(post: Posterior, draws: int, chains: int | None):
    """What `Posterior.to_arviz` returns."""
    az = import_arviz()
    wanted = ARVIZ_CHAINS if chains is None else chains
    shown = min(integer("to_arviz(chains)", wanted, 1, remedy="Give a positive integer, or None."), post.chains)
    # Each chain gives a multiple of this many draws, so that all of them can be cut into pieces of one length.
    unit = shown // int(np.gcd(shown, post.chains))
    each = max(1, min(-(-draws * shown // (post.chains * unit)), post.most_draws // unit)) * unit

    def merged(values: np.ndarray) -> np.ndarray:
        whole = values[:, : values.shape[1] // unit * unit]
        return whole.reshape(shown, -1, *values.shape[2:])

    x = post.draws(each)
    values = {name: merged(value) for name, value in post.variables(each).items()}
    stats = {"energy": merged(energy(x, post.mean(), post.cov()))}
    note = {"fedpdmc": json.dumps(post.settings, default=str), "verdict": str(post.verdict)}
    data = az.from_dict(posterior=values, sample_stats=stats, attrs=note)
    data.map(lambda group: group[list(values)], groups="posterior", inplace=True)
    if post.transformed:
        data.add_groups({"unconstrained_posterior": {n: merged(x[..., i]) for i, n in enumerate(post.names)}})
    return data


def plot(post: Posterior, kind: str, options: dict[str, Any]):
    """A plot of ArviZ, laid out so that the titles of one panel do not overlap the ticks of the next."""
    axes = getattr(import_arviz(), kind)(post.to_arviz(), **options)
    figures = {
        id(one.figure): one.figure for one in np.ravel(axes) if hasattr(one, "figure") and one.figure is not None
    }
    for figure in figures.values():
        figure.set_layout_engine("constrained")
    return axes
