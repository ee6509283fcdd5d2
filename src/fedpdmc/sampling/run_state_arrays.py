"""The chains, the counts and the choices of a run as arrays and facts, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedpdmc.bent_coordinates import Bend
from fedpdmc.dynamics import Turn
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.sampling.coordinator import State
from fedpdmc.sampling.laplace_reference import linear_control
from fedpdmc.whitening import Reference

if TYPE_CHECKING:
    from fedpdmc.sampling.defaults import Method

# Choices of a method that are plain values.
CHOICES = (
    "prior_at", "reference_name", "control_name", "seed", "segments", "bounds", "chosen", "first_plan", "chain_time",
    "wide_starts",
)  # fmt: skip
# What is kept of every chain; the shares of a prior only where it is redistributed, its scales where it has them, and the
# next turn where there are turns.
STATE, TURN = ("a", "v", "t", "number", "events", "site_events", "planned"), ("wait", "number")
OF_PRIOR = ("share", "scales")
LIMITS = ("constraints_A", "constraints_b")


class Position(NamedTuple):
    """The position of a run between two blocks.

    Every random number is a function of a key, a chain and the number of a plan, so this and the keys decide what follows.

    Attributes
    ----------
    chains : State
    rounds : int
        Rounds so far.
    asked : (2, sites)
        Of each site: exchanges that it took part in, and plans of single chains that it was sent.
    passes, violations : (sites,)
        Passes over each site's records, and rates seen above bounds that are not certified.
    burn_in_events : (chains,)
        Jumps of each chain in the burn-in.
    """

    chains: State
    rounds: int
    asked: np.ndarray
    passes: np.ndarray
    violations: np.ndarray
    burn_in_events: np.ndarray


def pack_position(position: Position) -> dict[str, np.ndarray]:
    """A position as arrays."""
    arrays = {f"state_{name}": np.asarray(getattr(position.chains, name)) for name in STATE}
    own = {name: getattr(position.chains, name) for name in OF_PRIOR}
    arrays |= {f"state_{name}": np.asarray(value) for name, value in own.items() if value is not None}
    if position.chains.turn is not None:
        arrays |= {f"turn_{name}": np.asarray(getattr(position.chains.turn, name)) for name in TURN}
    counts = {name: np.asarray(getattr(position, name)) for name in Position._fields[2:]}
    return arrays | counts | {"rounds": np.asarray([position.rounds])}


def unpack_position(arrays: dict[str, np.ndarray]) -> Position:
    """A position from arrays."""
    known = [*STATE, *(name for name in OF_PRIOR if f"state_{name}" in arrays)]
    chains = {name: jnp.asarray(arrays[f"state_{name}"]) for name in known}
    counts = {name: np.asarray(arrays[name]) for name in Position._fields[2:]}
    turn = Turn(*(jnp.asarray(arrays[f"turn_{name}"]) for name in TURN)) if f"turn_{TURN[0]}" in arrays else None
    chains = State(**chains, turn=turn)
    return Position(chains, int(arrays["rounds"][0]), **counts)


def pack_control(control: dict[str, ControlVariate], prefix: str = "") -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Control variates as orders by site and arrays."""
    arrays = {}
    for k, own in enumerate(control.values()):
        arrays[f"{prefix}precision_{k}"] = np.asarray(own.quadratic.precision)
        arrays[f"{prefix}linear_{k}"] = np.asarray(own.quadratic.linear)
        arrays[f"{prefix}point_{k}"] = np.asarray(own.point)
        if own.spread is not None:
            arrays[f"{prefix}spread_{k}"] = np.asarray(own.spread)
        if own.kept != 1.0:
            arrays[f"{prefix}kept_{k}"] = np.asarray([own.kept])
        if own.slope is not None:
            arrays[f"{prefix}slope_{k}"] = np.asarray(own.slope)
    return {name: own.order for name, own in control.items()}, arrays


def unpack_control(
    orders: dict[str, int], arrays: dict[str, np.ndarray], prefix: str = ""
) -> dict[str, ControlVariate]:
    """Control variates from orders by site and arrays."""

    def array(kind: str, k: int):
        return jnp.asarray(arrays[f"{prefix}{kind}_{k}"])

    control = {}
    for k, (name, order) in enumerate(orders.items()):
        spread = array("spread", k) if f"{prefix}spread_{k}" in arrays else None
        quadratic = Quadratic(array("precision", k), array("linear", k))
        kept = float(arrays.get(f"{prefix}kept_{k}", [1.0])[0])
        slope = array("slope", k) if f"{prefix}slope_{k}" in arrays else None
        control[name] = ControlVariate(quadratic, array("point", k), order, spread, kept, slope)
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
        "modes": list(reference.modes),
    }
    return facts, arrays


def unpack_reference(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Reference:
    """A reference from facts and arrays."""
    control = None if facts["orders"] is None else unpack_control(facts["orders"], arrays)
    center, scale = jnp.asarray(arrays["center"]), jnp.asarray(arrays["scale_tril"])
    bend = Bend.unpacked(arrays)
    narrow = tuple(facts["narrow"]) if facts.get("narrow") else None
    return Reference(
        center, scale, control, facts["rounds"], facts["bytes"], facts["name"], facts["why"], bend,
        narrow=narrow, modes=tuple(facts.get("modes", ())),
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
