"""The state of a run as arrays and facts, and back; and whether a continued run has the sites that it began with."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc.dynamics import Turn
from fedpdmc.errors import InputError
from fedpdmc.members.bounded_records import fingerprint as records_fingerprint
from fedpdmc.members.site import DescribedSites, Site
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.models.user_function import check_unchanged, program_digest
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.privacy.ledger import LedgerRequest
from fedpdmc.results.path_store import RunState
from fedpdmc.sampling.arguments import PRIOR_SITE, PriorSite, Redistributed, resolve_members
from fedpdmc.sampling.coordinator import State
from fedpdmc.sampling.laplace_reference import linear_control
from fedpdmc.whitening import Bend, Reference

if TYPE_CHECKING:
    from fedpdmc.sampling.defaults import Method

# Choices of a method that are plain values.
CHOICES = "prior_at reference_name control_name seed segments bounds chosen first_plan wide_starts".split()
LIMITS = ("constraints_A", "constraints_b")


def versions() -> dict[str, str]:
    """Versions of what decides the bits of a run."""
    return {name: metadata.version(name) for name in ("fedpdmc", "jax", "jaxlib", "numpy", "equinox")}


class Position(NamedTuple):
    """The position of a run between two blocks.

    Every random number is a function of a key, a chain and the number of a plan, so this and the keys decide what follows.
    """

    chains: State
    rounds: int  # so far
    asked: np.ndarray  # (2, sites): exchanges of each site, and plans of single chains that it was sent
    passes: np.ndarray  # (sites,): over each site's records
    violations: np.ndarray  # (sites,): rates seen above bounds that are not certified
    burn_in_events: np.ndarray  # (chains,): jumps in the burn-in


def pack_position(position: Position) -> dict[str, np.ndarray]:
    """A position as arrays; what chains do not have is left out: shares or scales of a prior, turns."""
    state = position.chains
    arrays = {f"turn_{name}": value for name, value in ({} if state.turn is None else vars(state.turn)).items()}
    arrays |= {f"state_{name}": value for name, value in vars(state).items() if name != "turn" and value is not None}
    arrays |= {name: getattr(position, name) for name in Position._fields[2:]}
    return {name: np.asarray(value) for name, value in arrays.items()} | {"rounds": np.asarray([position.rounds])}


def unpack_position(arrays: dict[str, np.ndarray]) -> Position:
    """A position from arrays."""

    def of(prefix: str) -> dict[str, Any]:
        return {k.removeprefix(prefix): jnp.asarray(x) for k, x in arrays.items() if k.startswith(prefix)}

    counts = {name: np.asarray(arrays[name]) for name in Position._fields[2:]}
    turn = Turn(**own) if (own := of("turn_")) else None
    return Position(State(**of("state_"), turn=turn), int(arrays["rounds"][0]), **counts)


def pack_control(control: dict[str, ControlVariate], prefix: str = "") -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Control variates as orders by site and arrays."""
    arrays = {}
    for k, own in enumerate(control.values()):
        parts = {"precision": own.quadratic.precision, "linear": own.quadratic.linear, "point": own.point}
        parts |= {"spread": own.spread, "slope": own.slope, "kept": None if own.kept == 1.0 else [own.kept]}
        arrays |= {f"{prefix}{kind}_{k}": np.asarray(x) for kind, x in parts.items() if x is not None}
    return {name: own.order for name, own in control.items()}, arrays


def unpack_control(
    orders: dict[str, int], arrays: dict[str, np.ndarray], prefix: str = ""
) -> dict[str, ControlVariate]:
    """Control variates from orders by site and arrays."""

    def array(kind: str, k: int):
        return jnp.asarray(arrays[f"{prefix}{kind}_{k}"])

    def optional(kind: str, k: int):
        return array(kind, k) if f"{prefix}{kind}_{k}" in arrays else None

    control = {}
    for k, (name, order) in enumerate(orders.items()):
        quadratic, point = Quadratic(array("precision", k), array("linear", k)), array("point", k)
        kept = float(arrays.get(f"{prefix}kept_{k}", [1.0])[0])
        control[name] = ControlVariate(quadratic, point, order, optional("spread", k), kept, optional("slope", k))
    return control


def pack_reference(reference: Reference) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A reference with its control variates, as facts and arrays."""
    orders, arrays = pack_control(reference.control or {})
    arrays |= {"center": np.asarray(reference.center), "scale_tril": np.asarray(reference.scale_tril)}
    arrays |= {} if reference.bend is None else reference.bend.packed()
    facts = {
        "rounds": reference.rounds,
        "bytes": reference.bytes,
        "orders": None if reference.control is None else orders,
        "name": reference.name,
        "why": reference.why,
        "narrow": None if reference.narrow is None else list(reference.narrow),
        # Stores of earlier software have no such fact: it did not search over a network.
        "other_modes": None if reference.modes is None else list(reference.modes),
    }
    return facts, arrays


def unpack_reference(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Reference:
    """A reference from facts and arrays."""
    control = None if facts["orders"] is None else unpack_control(facts["orders"], arrays)
    center, scale = jnp.asarray(arrays["center"]), jnp.asarray(arrays["scale_tril"])
    bend = Bend.unpacked(arrays)
    narrow, modes = tuple(facts["narrow"]) if facts.get("narrow") else None, facts.get("other_modes")
    return Reference(
        center, scale, control, facts["rounds"], facts["bytes"], facts["name"], facts["why"], bend,
        narrow=narrow, modes=None if modes is None else tuple(modes),
    )  # fmt: skip


def pack_choices(method: Method) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The choices of a run except for its sites and prior, as facts and arrays."""
    reference, arrays = pack_reference(method.reference)
    # A reference without control variates: they were computed separately.
    orders, own = pack_control(method.control if method.reference.control is None else {}, "own_")
    facts = {name: getattr(method, name) for name in CHOICES}
    if method.constraints is not None:
        own |= dict(zip(LIMITS, method.constraints, strict=True))
    return facts | {"reference": reference, "control_orders": orders}, arrays | own


def unpack_choices(
    facts: dict[str, Any], arrays: dict[str, np.ndarray]
) -> tuple[dict[str, Any], Reference, dict[str, ControlVariate]]:
    """Plain choices of a `Method`, the reference and the control variates from facts and arrays."""
    reference = unpack_reference(facts["reference"], arrays)
    if reference.control is None:
        control = unpack_control(facts["control_orders"], arrays, "own_")
    elif facts["control_name"] == "none":
        control = {}
    else:
        control = dict(reference.control) if facts["control_name"] == "quadratic" else linear_control(reference)
    choices = {name: facts[name] for name in CHOICES if name in facts}
    if LIMITS[0] in arrays:
        choices["constraints"] = tuple(np.asarray(arrays[name]) for name in LIMITS)
    return choices, reference, control


# Whether a continued run has the sites and the prior that it began with.
#
# The state of a run holds a hash of each site's model and records. Whoever reads an archive can test a guess of all records
# of a site against it; the paths and the seed, which are there too, allow that test without the hash. Of a site with a
# privacy budget no hash leaves the ledger: the ledger is asked whether it knows the run with these records.

AS_BEFORE = "Give the sites that sample() was given"


def identify(sites: Sequence[Site], prior: Quadratic | MixturePrior | None, redistribution: float) -> dict[str, Any]:
    """What is stored about the sites and the prior of a run, to recognise them when it continues."""
    members = [
        {
            "name": site.name,
            "coordinates": None if site.coordinates is None else site.coordinates.tolist(),
            "private": site.budget is not None,
            "fingerprint": None if site.budget is not None else site_fingerprint(site),
        }
        for site in sites
    ]
    if prior is None:
        return {"sites": members, "prior": None}
    digest = hashlib.sha256(repr(float(redistribution)).encode())
    _feed(digest, prior if isinstance(prior, MixturePrior) else [np.asarray(prior.precision), np.asarray(prior.linear)])
    return {"sites": members, "prior": digest.hexdigest()}


def site_fingerprint(site: Site) -> str:
    """A hash of a site's model and its records; a user's function counts as the program that it is traced to."""
    digest = hashlib.sha256()
    if site.model is None:
        _feed(digest, site.raw)
    else:
        digest.update(program_digest(site.model, site.dim).encode())
        _feed(digest, jax.tree.leaves(site.model.data))
    return digest.hexdigest()


def _feed(digest, value: Any) -> None:
    """Add numbers, arrays and containers of them to a hash, each with its type."""
    if dataclasses.is_dataclass(value):
        digest.update(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            digest.update(field.name.encode())
            _feed(digest, getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} items".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, (np.ndarray, jax.Array)):
        array = np.asarray(value)
        digest.update(repr((array.shape, array.dtype.str)).encode() + np.ascontiguousarray(array).tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, np.generic)):
        digest.update(repr(value).encode())


def members_of(
    state: RunState, names: list[str], sites: Any, prior: Any
) -> tuple[tuple[Site, ...], Quadratic | None, float]:
    """The sites in the order of the run, the prior and its rate of redistribution, once they are found to be the run's own.

    Parameters
    ----------
    state : RunState
    names : list of str
        The parameters' names.
    sites, prior
        As `fedpdmc.sample` takes them.

    Raises
    ------
    InputError
        Names the argument, and the site, that is not as it was.
    """
    rate = prior.rate if isinstance(prior, Redistributed) else 0.0
    given_prior = sites.prior if prior is None and isinstance(sites, DescribedSites) else prior
    members, prior, dim = resolve_members(sites, given_prior, None, names)
    if dim != len(names):
        raise InputError(
            "sites", f"models of {dim} parameters", f"The posterior has {len(names)}: {', '.join(names)}. {AS_BEFORE}."
        )
    own = [site for site in members if isinstance(site, Site)]
    if prior is not None and state.facts["prior_at"] == "extra":
        own.append(PriorSite(prior))
    for site in own:
        if site.model is not None:
            check_unchanged(site.model, site.dim, site.name)
    found = identify(own, given_prior if isinstance(given_prior, MixturePrior) else prior, rate)
    given = {site.name: site for site in own}
    known = {one["name"]: one for one in state.facts["sites"]}
    if (PRIOR_SITE in known) != (PRIOR_SITE in given) or found["prior"] != state.facts["prior"]:
        flat = prior is None and PRIOR_SITE not in given
        what = "None, a flat prior" if flat else "another prior than that of the run"
        raise InputError("prior", what, "Give the prior that sample() was given.")
    if set(known) != set(given):
        one, other = (", ".join(sorted(set(names) - {PRIOR_SITE})) for names in (given, known))
        raise InputError("sites", f"{len(given)} named {one}", f"The run has {len(known)}: {other}. {AS_BEFORE}.")
    for now in found["sites"]:
        site, before = given[now["name"]], known[now["name"]]
        argument = f"sites ({site.name!r})"
        if now["coordinates"] != before["coordinates"]:
            remedy = f"The run has {before['coordinates']}. {AS_BEFORE}."
            raise InputError(argument, f"coordinates={now['coordinates']}", remedy)
        if now["private"] != before["private"]:
            what = "no privacy budget" if before["private"] else "a privacy budget"
            raise InputError(argument, what, f"It is not as the run began. {AS_BEFORE}.")
        if now["fingerprint"] != before["fingerprint"]:
            remedy = f"{AS_BEFORE}, or sample again."
            if site.model is not None:
                remedy += f" A function is known by the program that JAX {state.facts['versions']['jax']} traced it to."
            raise InputError(argument, "another model or other records than those of the run", remedy)
    return tuple(given[name] for name in known), prior, rate


def check_ledger(site: Site, run: str) -> None:
    """Check that the ledger of a private site knows a run with these records, before anything is charged."""
    budget = site.budget
    assert budget is not None
    records = bytes.fromhex(records_fingerprint(site.raw))
    ledger, _ = budget.open()
    if not ledger.answered(LedgerRequest(budget.account_name, budget.study, run, "open", 0, records)):
        raise InputError(
            f"sites ({site.name!r})",
            f"a budget whose ledger does not have run {run!r} on these records",
            "Give the records, the ledger, the data set and the study with which the posterior was sampled.",
        )
