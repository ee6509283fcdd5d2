"""A posterior as an ArviZ ``InferenceData``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpdmc.console.warnings import has_inference_data, import_arviz
from fedpdmc.errors import InputError
from fedpdmc.results.diagnostics import energy
from fedpdmc.validation import integer

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior

ARVIZ_CHAINS = 4  # that ArviZ is given by default
MOST_NUMBERS = 2**27  # in a group of a value for each record and draw: a gigabyte
UNCONSTRAINED = "unconstrained_posterior"
PLOTS = {"plot_trace": "plot_trace_dist"}  # names in ArviZ below 1, and from 1 on


def to_arviz(
    post: Posterior, draws: int, chains: int | None, log_likelihood: bool, predictive: bool, sites: Any, seed: int | None
):  # fmt: skip
    """What `Posterior.to_arviz` returns."""
    wanted = ARVIZ_CHAINS if chains is None else chains
    shown = min(integer("to_arviz(chains)", wanted, 1, remedy="Give a positive integer, or None."), post.chains)
    # Each chain gives a multiple of this many draws, so that all of them can be cut into pieces of one length.
    unit = shown // int(np.gcd(shown, post.chains))
    each = max(1, min(-(-draws * shown // (post.chains * unit)), post.most_draws // unit)) * unit

    def merged(values: np.ndarray) -> np.ndarray:
        whole = values[:, : values.shape[1] // unit * unit]
        return whole.reshape(shown, -1, *values.shape[2:])

    x = post.draws(each)
    groups: dict[str, dict[str, np.ndarray]] = {
        "posterior": {name: merged(value) for name, value in post.named_by(sites).of(x).items()},
        "sample_stats": {"energy": merged(energy(x, post.mean(), post.cov()))},
    }
    if post.transformed:
        groups[UNCONSTRAINED] = {name: merged(x[..., i]) for i, name in enumerate(post.names)}
    if log_likelihood or predictive:
        own = merged(x)
        known = list(_with_responses(post, sites))
        groups |= _of_records(known, own, log_likelihood, "posterior_predictive" if predictive else "", seed)
    note = {"fedpdmc": json.dumps(post.settings, default=str), "verdict": str(post.verdict)}
    return _data(groups, note)


def prior_predictive(sites: Any, x: np.ndarray, values: dict[str, np.ndarray], rng: np.random.Generator):
    """What `fedpdmc.study.sites_from_table.Sites.prior_predictive` returns, for draws x of shape (n, d)."""
    groups = {"prior": values} | _of_records(
        [site.responses for site in sites], x[None], False, "prior_predictive", rng
    )
    return _data(groups, {})


def _with_responses(post: Posterior, sites: Any) -> Iterator[Any]:
    members = sites if sites is not None else () if post.run is None else post.run.members
    where = "log_likelihood, posterior_predictive"
    if not members:
        raise InputError(
            where,
            "a posterior without the sites' records, from a network or from disk",
            "Records stay at their sites: use fedpdmc.assessment.assess, or `fedpdmc assess` at each site, for predictive "
            "accuracy and checks. If the sites are in this process, give sites=.",
        )
    for member in members:
        if member.name == post.settings.get("prior_site"):
            continue
        if member.responses is None:
            remedy = "Make the sites with fedpdmc.sites: a function of all records has no law of one response."
            raise InputError(where, f"site {member.name!r}, which is not from a table", remedy)
        yield member.responses


def _of_records(
    known: Sequence[Any], x: np.ndarray, log_likelihood: bool, predictive: str, seed: Any
) -> dict[str, dict[str, np.ndarray]]:
    """Groups of one value for each record and draw, x of shape (chains, draws, d), with the observed ones."""
    count, response = sum(len(one.records) for one in known), known[0].study.design.response_name
    if (size := count * x.shape[0] * x.shape[1]) > MOST_NUMBERS:
        raise InputError(
            "draws",
            f"{x.shape[0] * x.shape[1]:,} draws of {count:,} records, {size:,} numbers",
            f"Ask for at most {MOST_NUMBERS // count:,} draws over all chains; fedpdmc.assessment.assess works in blocks.",
        )
    rng, flat = np.random.default_rng(seed), x.reshape(-1, x.shape[-1])
    parts = [one.groups(flat, log_likelihood, bool(predictive), rng) for one in known]

    def joined(name: str) -> dict[str, np.ndarray]:
        whole = np.concatenate([part[name] for part in parts])
        return {response: np.moveaxis(whole.reshape(count, *x.shape[:2]), 0, -1) if name != "observed" else whole}

    found = {"observed_data": joined("observed")}
    found |= {"log_likelihood": joined("log_likelihood")} if log_likelihood else {}
    found |= {predictive: joined("predictive")} if predictive else {}
    site = np.repeat([one.site for one in known], [len(one.records) for one in known])
    return found | {"constant_data": {"site": site}}


def _data(groups: dict[str, dict[str, np.ndarray]], note: dict[str, str]):
    """An ``InferenceData`` of ArviZ below 1, a ``DataTree`` from 1 on; variables in the order that they are given in."""
    az, dims = import_arviz(), {name: ["record"] for name in (*groups.get("observed_data", {}), "site")}
    if not has_inference_data(az):
        return az.from_dict(groups, dims=dims, attrs={"/": note})
    extra = {name: group for name, group in groups.items() if name == UNCONSTRAINED}
    data = az.from_dict(**{name: group for name, group in groups.items() if name not in extra}, dims=dims, attrs=note)
    for name in groups.keys() & {"posterior", "prior"}:
        data.map(lambda group, order=list(groups[name]): group[order], groups=name, inplace=True)
    if extra:
        data.add_groups(extra)
    return data


def plot(post: Posterior, kind: str, options: dict[str, Any]):
    """A plot of ArviZ, laid out so that the titles of one panel do not overlap the ticks of the next."""
    az = import_arviz()
    if not has_inference_data(az):
        return getattr(az, PLOTS.get(kind, kind))(post.to_arviz(), **options)
    axes = getattr(az, kind)(post.to_arviz(), **({"kind": "kde"} if kind == "plot_pair" else {}) | options)
    figures = {
        id(one.figure): one.figure for one in np.ravel(axes) if hasattr(one, "figure") and one.figure is not None
    }
    for figure in figures.values():
        figure.set_layout_engine("constrained")
    return axes
