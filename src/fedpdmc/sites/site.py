"""A site: the owner of records, who answers plans and tells nothing else."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from fedpdmc._jax.compilation_cache import use_compilation_cache
from fedpdmc._jax.random_streams import ChainKeys
from fedpdmc.clocks import (
    AdaptiveClock,
    Clock,
    FlippingClock,
    PolynomialClock,
    StagedClock,
    Walk,
    clock_for,
    curve_clock,
    flipping_clock,
    follow,
    holding,
)
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError, PrivacyError
from fedpdmc.models.user_function import Written, derivatives_of, written
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import (
    ControlVariate,
    LinearPredictor,
    LinearUnknownScale,
    Potential,
    Program,
    Quadratic,
    Shared,
    Sum,
    cubic_remainder,
    known_orders,
    polynomial_on_lines,
    polynomial_remainder,
    taylor_quadratic,
)
from fedpdmc.potentials.padding import Padded
from fedpdmc.privacy.budget import Budget
from fedpdmc.sites.clipping import hold_to_bounds
from fedpdmc.sites.member import Member
from fedpdmc.validation import optional_seed
from fedpdmc.whitening import Reference

use_compilation_cache()

# Passes over the records per unit of process time above which cells, which need a few, are the better way.
MOST_STAGED_PASSES = 8.0
# Cost of a clock on a polynomial, as it counts it, above which cells are the better way.
MOST_COST = 80.0
# Share of a usual rate that its rounding may be; and rounding, per unit of velocity, above which a polynomial is not used,
# because what is known of rounding there is an estimate, whereas cells and curves carry a bound of it.
NOISY, CLEAN = 1e-3, 1e-6
# Relative difference of two quadratics that are the same but for rounding.
SAME = 1e-12


class Site(Member):
    """One owner of data in a federation.

    Parameters
    ----------
    potential : Potential or callable
        The minus log likelihood of the site's records: from `fedpdmc.models`, or any JAX function ``f(x, data)`` that
        returns it, a number.
    name : str
        Unique within the federation.
    coordinates : sequence of int, optional
        The entries of the parameter vector that the site depends on, in the order in which its model takes them; all if
        None.
    data : optional
        Data for a potential given as a function, a pytree of arrays (floating ones are taken to 64 bits); without them
        the function is called as ``f(x)``. None of the models of `fedpdmc.models` needs it.
    seed : int, optional
        The site's own secret randomness. In process None derives it from the run's seed and the site's name.
    budget : Budget, optional
        The site's privacy budget: the site then counts what it reveals, and stops before its limit.
    log : callable, optional
        In process, ``log(plan, arrival)`` is called with every plan that the site is sent and with its arrival, all that
        passes between it and the coordinator, as NumPy arrays. Rounds are then made one by one, which is slower. Sites on a
        network keep a log on disk.

    Attributes
    ----------
    raw : Potential
        The potential as given; `potential` is that of the records within the budget's declared bounds.
    model : Written or None
        The user's function, where the potential is one. Until the number of its parameters is known (`sized`) there is
        no potential.
    """

    def __init__(
        self,
        potential: Potential | Written | Callable,
        *,
        name: str,
        coordinates: Sequence[int] | None = None,
        data: Any = None,
        seed: int | None = None,
        budget: Budget | None = None,
        log: Callable[[Plan, Arrival], None] | None = None,
    ):
        if not isinstance(name, str) or not name:
            raise InputError("Site(name)", repr(name), "Give a non-empty string.")
        given = isinstance(potential, (Potential, Written))
        if not given and not callable(potential):
            raise InputError(
                "Site(potential)",
                type(potential).__name__,
                "Give a potential made by fedpdmc.models, such as logistic(X, y), or a JAX function f(x, data) that returns "
                "the minus log likelihood.",
            )
        if given and data is not None:
            raise InputError(
                "Site(data)", type(data).__name__, "The models of fedpdmc.models hold their data: leave data out."
            )
        if budget is not None and not isinstance(budget, Budget):
            raise InputError("Site(budget)", repr(budget), "Give a fedpdmc.Budget, or None.")
        if log is not None and not callable(log):
            raise InputError("Site(log)", repr(log), "Give a function of a plan and an arrival, or None.")
        seed = optional_seed("Site(seed)", seed)
        if budget is not None and seed is not None and not budget.seeded_for_tests:
            warnings.warn(
                f"site {name!r} has a seed and a privacy budget: whoever guesses the seed knows its randomness, and nothing "
                "is private. Leave the seed out; for tests, Budget(seeded_for_tests=True).",
                stacklevel=2,
            )
        self.name = name
        self.seed = seed
        self.budget: Budget | None = budget
        self.log = log
        self.model = None if isinstance(potential, Potential) else _model(potential, data, budget)
        self._potential: Potential | None = None
        if isinstance(potential, Potential):
            self.raw = potential
            self._potential = potential if budget is None else hold_to_bounds(potential, budget)
        self.coordinates = _check_coordinates(coordinates, self.known_dim)
        dim = self.known_dim if self.coordinates is None else len(self.coordinates)
        if dim is not None:
            self._take_size(dim)

    def __repr__(self) -> str:
        model = "a function" if self._potential is None else type(self._potential).__name__
        return f"Site({self.name!r}, {model}, dim={self.known_dim}, records={self.records})"

    @property
    def known_dim(self) -> int | None:
        """Number of parameters that the site depends on, None if it is not known yet."""
        if self._potential is not None:
            return self._potential.dim
        return None if self.model is None else self.model.dim

    @property
    def potential(self) -> Potential:
        """The minus log likelihood of the site's records."""
        if self._potential is None:
            raise no_size(self.name)
        return self._potential

    @property
    def dim(self) -> int:
        """Number of parameters that the site depends on."""
        return self.potential.dim

    def _take_size(self, dim: int) -> None:
        if self._potential is None and self.model is not None:
            self._potential = self.raw = self.model.sized(dim, self.name)

    def sized(self, dim: int) -> Site:
        """The same site with a potential of ``dim`` parameters, where its model is a function that did not say."""
        if self._potential is not None:
            return self
        site = copy.copy(self)
        site._take_size(dim)
        return site

    def padded(self, size: int) -> Site:
        """The same site, where its model is a function, with records padded to ``size``; itself if that cannot be done."""
        if self.model is None or isinstance(getattr(self._potential, "function", None), Padded):
            return self
        potential = self.model.padded(self.dim, self.name, size)
        if potential is None:
            return self
        site = copy.copy(self)
        site._potential = site.raw = potential
        return site

    @property
    def noisy(self) -> bool:
        """Whether its derivatives are released with noise only, and charged."""
        return self.budget is not None

    @property
    def records(self) -> int:
        """Number of records."""
        return self.model.records if self.model is not None else int(getattr(self.potential, "records", 0))

    def derivatives(self, x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """``U_m``, ``∇U_m`` and ``∇²U_m`` at ``x[coordinates]``: a release, made only to build a reference."""
        if self.budget is not None:
            raise PrivacyError(
                f"site {self.name!r}: derivatives without noise are not released under a privacy budget (code NO_RELEASE)."
            )
        return derivatives(self, x if self.coordinates is None else x[self.coordinates])

    def key(self, run_seed: int) -> Key[Array, ""]:
        """The site's secret key: its own seed, or one derived from the run's seed and its name."""
        seed = run_seed if self.seed is None else self.seed
        kind = "run" if self.seed is None else "own"
        digest = hashlib.sha256(f"{kind}/{seed}/{self.name}".encode()).digest()
        return jax.random.fold_in(jax.random.key(seed), int.from_bytes(digest[:4], "little"))


def no_size(name: str) -> InputError:
    """What a function lacks if nobody says how many parameters it has."""
    return InputError(
        f"sites ({name!r})",
        "a function whose number of parameters is not known",
        "Give a prior, init= or names=, or coordinates= to the site: its number of parameters is taken from there.",
    )


def _model(potential: Any, data: Any, budget: Budget | None) -> Written:
    if budget is not None:
        raise InputError(
            "Site(budget)",
            "a model given as a function, whose records have no known sensitivity",
            "Privacy budgets need a model of records from fedpdmc.models.",
        )
    return potential if isinstance(potential, Written) else written(potential, data)


P = TypeVar("P", bound=Potential)
W = TypeVar("W")


def derivatives(site: Site, own: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """``U_m``, ``∇U_m`` and ``∇²U_m`` in the site's own parameters, for its own use."""
    value, gradient, hessian = derivatives_of(_bare(site.potential), jnp.asarray(own))
    return float(value), np.asarray(gradient), np.asarray(hessian)


def _bare(potential: P) -> P:
    """Without the records that a quadratic remembers, for which the compiler would start anew."""
    return dataclasses.replace(potential, source=None, records=0) if isinstance(potential, Quadratic) else potential


class Opening(NamedTuple):
    """What a site must know to take part in a run: all of it public.

    Attributes
    ----------
    reference : Reference
        Over all parameters.
    dynamics : Dynamics
    control : ControlVariate or None
        The public quadratic that is moved from the site to the coordinator.
    prior_share : Quadratic or None
        The part of the prior that this site walks with.
    redistributed : bool
        Whether ``prior_share`` is the whole prior, of which every plan says the part.
    adaptive : bool
        Whether a model that is a user's own function walks under bounds guessed on a grid.
    """

    reference: Reference
    dynamics: Dynamics
    control: ControlVariate | None = None
    prior_share: Quadratic | None = None
    redistributed: bool = False
    adaptive: bool = False


def local_columns(site: Member, opening: Opening) -> np.ndarray | None:
    """The whitened coordinates that a site is sent: its own if flips move only them, else all (None)."""
    own = opening.dynamics.flips and opening.reference.diagonal
    return site.coordinates if own else None


def open_site(site: Site, opening: Opening) -> Clock:
    """The site's clock for this run: its records in whitened coordinates, less the control variate.

    Raises
    ------
    NoEnclosure
        If the site's model is a function that jumps, or that has no certified bounds.
    """
    if isinstance(site.potential, Program) and not opening.adaptive:
        site.potential.check_continuity()
    whitened = in_coordinates(_less_control(_padded(site.potential), opening.control), site, opening)
    sent = local_columns(site, opening)
    if opening.prior_share is not None:
        share = whiten(opening.prior_share, opening.reference, None)
        whitened = Shared(whitened, share) if opening.redistributed else _sum(whitened, share)
    if opening.adaptive and site.model is not None:
        return AdaptiveClock(whitened, opening.dynamics)
    if isinstance(whitened, Program):
        return _program_clock(site.name, opening, whitened)
    prepared = _prepared(whitened, opening.dynamics)
    staged = _staged_clock(site, opening, prepared) if sent is None else None
    return clock_for(prepared, opening.dynamics) if staged is None else staged


def _program_clock(name: str, opening: Opening, program: Program) -> Clock:
    """Polynomials where there are few parameters, else curves, else cells; the usual cell is measured where it matters."""
    dynamics = opening.dynamics
    few = dynamics.flips != dynamics.flow.rotating and known_orders(program.dim, dynamics.flow.rotating)
    curved = None if few else curve_clock(program, dynamics)
    if curved is not None:
        return curved
    paced = _paced(program, dynamics)
    _check_noise(paced, name)
    polynomial = (_polynomial_clock(opening, paced) or curve_clock(paced, dynamics)) if few else None
    return clock_for(paced, dynamics) if polynomial is None else polynomial


def less_public(site: Site, opening: Opening) -> Potential:
    """The records, and beside them the public control variate, in whitened coordinates: no branch looks at the records."""
    records, control = in_coordinates(_padded(site.potential), site, opening), whitened_control(site, opening)
    return records if control is None else Sum((records, control.scaled(-1.0)))


def whitened_control(site: Site, opening: Opening) -> Quadratic | None:
    """The control variate in the run's coordinates."""
    return None if opening.control is None else in_coordinates(opening.control.quadratic, site, opening)


def in_coordinates(potential: P, site: Site, opening: Opening) -> P:
    """A function of the site's own parameters, in the whitened coordinates that it is sent."""
    sent = local_columns(site, opening)
    if sent is not None:
        return whiten(potential, opening.reference.restricted(jnp.asarray(sent)), None)
    columns = None if site.coordinates is None else jnp.asarray(site.coordinates)
    return whiten(potential, opening.reference, columns)


def _staged_clock(site: Site, opening: Opening, potential: Potential) -> StagedClock | None:
    """A clock that thins on third-order knowledge first, where it would pass over the records seldom enough."""
    control = opening.control
    if control is None or control.order != 2 or not isinstance(potential, LinearPredictor) or potential.diagonal:
        return None
    if site.coordinates is not None or not site.records:
        return None
    remainder = cubic_remainder(potential, opening.reference.to_a(control.point))
    clock = StagedClock(potential=potential, remainder=remainder, dynamics=opening.dynamics)
    return clock if clock.usual_passes() <= MOST_STAGED_PASSES else None


def _check_noise(program: Program, name: str) -> None:
    """Refuse a function whose rates are computed with an error that is not small against them."""
    if program.noise is None or program.usual is None or not np.isfinite(program.noise):
        return
    share = float(program.noise) / max(1.0, float(program.usual))
    if share > NOISY:
        raise InputError(
            f"sites ({name!r})",
            f"a model whose event rates are lost in rounding: their error may be {share:.1g} of their size",
            "Look for values in 32 bits, for large offsets that are added and taken off again, and for differences such as "
            "(1 + u) - 1 or log(1 + u): write them with expm1, log1p and centred data.",
        )


def _polynomial_clock(opening: Opening, program: Program) -> PolynomialClock | FlippingClock | None:
    """A clock that thins on a polynomial first, where the program's derivatives can be enclosed well enough."""
    dynamics, control = opening.dynamics, opening.control
    if dynamics.flips == dynamics.flow.rotating or program.noise is None or not program.noise <= CLEAN:
        return None
    whole = control is not None and control.point.shape == opening.reference.center.shape
    center = opening.reference.to_a(control.point) if control is not None and whole else jnp.zeros(program.dim)
    if dynamics.flips:
        known = polynomial_on_lines(program, np.asarray(center), float(program.noise))
        return None if known is None else flipping_clock(program, known, dynamics)
    remainder = polynomial_remainder(program, np.asarray(center), float(program.noise))
    if remainder is None:
        return None
    clock = PolynomialClock(potential=program, remainder=remainder, dynamics=dynamics)
    return clock if clock.usual_cost() < MOST_COST else None


def _less_control(potential: Potential, control: ControlVariate | None) -> Potential:
    """``U − q``: the records less their own Taylor polynomial, plus what that polynomial differs from q."""
    if control is None:
        return potential
    if isinstance(potential, Quadratic):
        return potential.plus(control.quadratic, -1.0)
    if isinstance(potential, Program):
        return potential.less(control.quadratic)
    if isinstance(potential, LinearUnknownScale):
        return Sum((potential, control.quadratic.scaled(-1.0)))
    if not isinstance(potential, LinearPredictor):
        raise InputError(
            "control", type(potential).__name__, "Control variates need a built-in model: use control='none'."
        )
    expanded, difference, same = _expanded(potential, control)
    return expanded if bool(same) else Sum((expanded, difference))


@eqx.filter_jit
def _expanded(potential: LinearPredictor, control: ControlVariate):
    """The records less their Taylor polynomial, what that differs from the control variate, and whether it is rounding."""
    own = taylor_quadratic(potential, control.point, control.order)
    difference = own.plus(control.quadratic, -1.0)
    size = jnp.max(jnp.abs(own.precision))
    same = jnp.max(jnp.abs(difference.precision)) <= SAME * size
    reach = jnp.max(jnp.abs(own.linear)) + size * jnp.max(jnp.abs(control.point))
    same &= jnp.max(jnp.abs(difference.linear)) <= SAME * reach
    return potential.expanded_at(control.point, control.order), difference, same


def whiten(potential: P, reference: Reference, columns) -> P:
    """The potential in whitened coordinates, compiled once for each shape."""
    return _whiten(_bare(potential), Reference(reference.center, reference.scale_tril), columns)


@eqx.filter_jit
def _whiten(potential: P, reference: Reference, columns) -> P:
    return potential.whiten(reference, columns)  # type: ignore[return-value]


def _padded(potential: Potential) -> Potential:
    """Records padded to a shape that other sites share."""
    return potential.padded(bucket(potential.design.shape[0])) if isinstance(potential, LinearPredictor) else potential


def _sum(first: Potential, second: Potential) -> Potential:
    if isinstance(first, Quadratic) and isinstance(second, Quadratic):
        return first.plus(second)
    return Sum((first, second))


def _prepared(potential: Potential, dynamics: Dynamics) -> Potential:
    """The records with what the dynamics can use of them worked out once."""
    if isinstance(potential, Sum):
        return Sum(tuple(_prepared(term, dynamics) for term in potential.terms))
    if isinstance(potential, Shared):
        return Shared(_prepared(potential.records, dynamics), potential.prior)
    if isinstance(potential, Program):
        return _paced(potential, dynamics)
    if not dynamics.flips or dynamics.flow.rotating:
        return potential
    if isinstance(potential, Quadratic):
        return potential.separated()
    return _with_cubic(potential) if isinstance(potential, LinearPredictor) else potential


@eqx.filter_jit
def _paced(potential: Program, dynamics: Dynamics) -> Program:
    return potential.paced(dynamics.flow.rotating, dynamics.flips)


@eqx.filter_jit
def _with_cubic(potential: LinearPredictor) -> LinearPredictor:
    return potential.with_cubic()


def answer(clock: Clock, keys: ChainKeys, plan: Plan) -> tuple[Arrival, Walk]:
    """Walk a plan to the end on every chain: the site's whole part in a round."""
    path, clock = follow(clock.dynamics, plan), holding(clock, plan.share)
    state = clock.restart(clock.idle(plan.start.shape[0]), jnp.ones(plan.start.shape[0], bool), path)
    state = jax.lax.while_loop(lambda s: jnp.any(~clock.walk(s).done), lambda s: clock.step(s, path, keys), state)
    walk = clock.walk(state)
    return walk.arrival(clock.dynamics), walk


def begin_walk(clock: Clock[W], plan: Plan) -> W:
    """A walk at the start of a plan."""
    path, chains = follow(clock.dynamics, plan), plan.start.shape[0]
    return clock.restart(clock.idle(chains), jnp.ones(chains, bool), path)


def walk_on(clock: Clock[W], keys: ChainKeys, state: W, plan: Plan, steps: Int[Array, ""]) -> tuple[W, Bool[Array, ""]]:
    """At most so many steps more of a walk, and whether it is at its end."""
    path = follow(clock.dynamics, plan)

    def going(carry):
        return jnp.any(~clock.walk(carry[1]).done) & (carry[0] < steps)

    _, state = jax.lax.while_loop(
        going, lambda carry: (carry[0] + 1, clock.step(carry[1], path, keys)), (jnp.zeros_like(steps), state)
    )
    return state, ~jnp.any(~clock.walk(state).done)


def _check_coordinates(coordinates: Sequence[int] | None, dim: int | None) -> np.ndarray | None:
    if coordinates is None:
        return None
    index = np.asarray(coordinates)
    dim = index.size if dim is None else dim
    if index.ndim != 1 or index.dtype.kind not in "iu" or index.shape[0] != dim:
        raise InputError(
            "Site(coordinates)", repr(coordinates), f"Give {dim} integers, one for each parameter of the site's model."
        )
    if len(set(index.tolist())) != dim or index.min(initial=0) < 0:
        raise InputError("Site(coordinates)", repr(coordinates), "Give distinct indices that are zero or positive.")
    return index


def bucket(n: int) -> int:
    """The padded number of records: powers of two to 1024, then steps of an eighth of a power of two."""
    if n <= 16:
        return 16
    power = 1 << (n - 1).bit_length()
    if power <= 1024:
        return power
    step = power // 16
    return -(-n // step) * step
