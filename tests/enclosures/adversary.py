"""The attack on one program: bounds in every domain against the rates that the program computes, and exact arithmetic.

Attacked are cells and Taylor models in time, on a line or a rotation, of reflections or of flips;
in the bulk, in the tails and at kinks. A violation is a computed rate, or a value in exact arithmetic, outside
its bound, a rate that is not a number under a finite bound, and a jump of the value where the program is shown to have none.
"""

import contextlib
import math
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from tests.enclosures import exact
from tests.enclosures.random_programs import DIM, JUMPING, names, program_of, random_tree, records, smaller

from fedpdmc._jax.by_numpy import by_numpy, mapped_by_numpy
from fedpdmc.clocks.thinning import HIGH_ORDER, ORDER
from fedpdmc.enclosures import TimeInterval, enclose
from fedpdmc.errors import Discontinuous, NoEnclosure
from fedpdmc.potentials.jax_function import curved_path

# Cells for each kind of path, times on each, and the orders of Taylor models, one of them for each program.
CELLS, TIMES, ORDERS = 10, 8, (ORDER, HIGH_ORDER)
LENGTHS, SIZES = (1e-4, 1e-2, 0.1, 0.6), (0.3, 1.0, 4.0, 40.0)
KINDS = ((False, False), (False, True), (True, False), (True, True))  # rotating, flips
# A line is divided so often into so many parts; what changes by this on the last of them, and so many times more than on
# all others, has jumped.
DIVISIONS, PARTS, JUMP, STEEP = 9, 33, 1e-5, 4.0
# Lines on which a program that may jump is examined.
LINES = 4
# The cells of which the rates are computed in exact arithmetic: any, and one that begins near a kink.
EXACT = (CELLS - 1, 2)
# What the second implementation does not know.
INEXACT = {
    "32 bits", "32-bit sum", "offset", "phase", "large", "scan", "loop", "branch", "branch with a kink", "softmax", "erf",
    "erfc", "log ndtr", "atan", "lgamma", "digamma", "cholesky", "map", "cosh", "asinh", "by segment", "added", "dropped",
    "largest", "log sum exp", "product", "backwards", "joint", "three kinks", *JUMPING,
}  # fmt: skip


class Violation(AssertionError):
    """A bound that does not hold, with the place."""


def attack(tree, seed: int, seen: Counter | None = None, compiled: bool = False) -> Counter:
    """Attack one program.

    Parameters
    ----------
    tree
        The program.
    seed : int
        Of data, paths and times.
    seen : Counter, optional
        To which is added what was checked, and what was refused and why.
    compiled : bool
        Whether rates and bounds are compiled by XLA, as in a run; else NumPy computes both, which is faster for one program.

    Returns
    -------
    Counter

    Raises
    ------
    Violation
    """
    seen = Counter() if seen is None else seen
    rng = np.random.default_rng(seed)
    program = program_of(tree, records(seed))
    try:
        program.check_continuity()
    except Discontinuous as error:
        # Some, of kinks within kinks, are not shown to be continuous though they are, and nothing is promised.
        kind = "may jump" if names(tree) & JUMPING else "not shown continuous"
        seen[f"{kind}: " + str(error).split(": ", 1)[-1][:60]] += 1
        return seen
    rotating, flips = KINDS[rng.integers(len(KINDS))]
    a, v, h, times = paths(rng, program.data, rotating, flips)
    for _ in range(LINES if names(tree) & JUMPING else 1):
        check_no_jump(program._likelihood, rng, seen)
    rate = program._program(flips)
    rates = computed(compiled, rate, rotating, a, v, times)
    exactly = {} if names(tree) & INEXACT else exact_rates(rate, rotating, a, v, times)
    seen["rates in exact arithmetic"] += sum(map(len, exactly.values()))
    for order in (1, ORDERS[seed % len(ORDERS)]):
        name = f"on curves of order {order}"
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                low, high = on_curves(compiled, rate, rotating, a, v, h, times, order)
        except NoEnclosure as error:
            seen[f"refused by {name}: {error.primitive}"] += 1
            continue
        place = (name, "rotation" if rotating else "line", "flips" if flips else "reflections")
        inside(low, rates, high, place, a, v, h, times)
        held_exactly(low, exactly, high, place, times)
        bounded = np.isfinite(high)
        seen[name] += int(bounded.sum())
        seen["not finite " + name] += int((~bounded).sum())
    seen["programs"] += 1
    return seen


def check_no_jump(function, rng, seen: Counter) -> None:
    """Fail where values jump along a line.

    The part of the line on which the value changes the most is divided again and again. Continuous values get nearer, by
    their slope; a jump stays, and so does a slope that begins and ends within the last part.
    """
    a, v = rng.normal(size=(2, DIM)) * rng.choice(SIZES[:3])
    low, high = -1.0, 1.0
    for _ in range(DIVISIONS):
        times = np.linspace(low, high, PARTS)
        values = mapped_by_numpy(function, a + times[:, None] * v)
        if not np.all(np.isfinite(values)):
            return
        change = np.abs(np.diff(values))
        k = int(np.argmax(change))
        low, high = times[k], times[k + 1]
    seen["lines without jumps"] += 1
    # Where a value is steep, or noise, all parts of the last line change alike.
    if change[k] > max(JUMP * (1 + np.abs(values[k])), STEEP * np.partition(change, -2)[-2]):
        if is_steep(function, a + low * v, a + high * v, v):
            seen["steep instead of jumps"] += 1
            return
        raise Violation(f"the value jumps by {change[k]!r} at {(a + low * v).tolist()}")


def is_steep(function, one, other, v) -> bool:
    """Whether a change of the value between two points is no jump: it is lost between nearer ones, or the slope overflows.

    Points are halved until no number is between them: near zero that is finer than a time can be. Where the slope that the
    program computes is finite on neither side a process stops, and nothing is promised.
    """

    def slope(x, v):
        return jax.jvp(function, (x,), (v,))[1]

    with np.errstate(invalid="ignore", over="ignore"):
        if not np.any(np.isfinite(mapped_by_numpy(slope, np.stack([one, other]), np.stack([v, v])))):
            return True
        first, last = mapped_by_numpy(function, np.stack([one, other]))
        while True:
            middle = one + 0.5 * (other - one)
            if np.array_equal(middle, one) or np.array_equal(middle, other):
                return bool(abs(last - first) <= JUMP * (1 + abs(first)))
            (value,) = mapped_by_numpy(function, middle[None])
            if abs(value - first) > abs(last - value):
                other, last = middle, value
            else:
                one, first = middle, value


def mapped(compiled: bool, function, *args):
    """The values of a function at the rows of arrays, by XLA or by NumPy."""
    return jax.jit(jax.vmap(function))(*map(jnp.asarray, args)) if compiled else mapped_by_numpy(function, *args)


def paths(rng, data, rotating: bool, flips: bool):
    """Anchors of all sizes, some on a kink, with velocities, lengths and times (a row for each cell)."""
    a = rng.normal(size=(CELLS, DIM)) * rng.choice(SIZES, (CELLS, 1), p=[0.3, 0.4, 0.2, 0.1])
    a[0] = 0.0
    a[1] = np.round(a[1])
    x = np.asarray(data["X"])[0]
    a[2] -= x * (a[2] @ x) / max(x @ x, 1e-3)  # The first linear predictor is zero there, up to rounding.
    v = rng.normal(size=(CELLS, DIM))
    if flips and not rotating:
        v = np.where(v > 0, 1.0, -1.0)
    h = rng.choice(LENGTHS, CELLS)
    within = np.concatenate([np.zeros((CELLS, 1)), np.ones((CELLS, 1)), rng.random((CELLS, TIMES - 2))], 1)
    return a, v, h, within * h[:, None]


def moved(rotating: bool, a, v, times):
    """Positions and velocities, of shape (cells, times, d)."""
    s, a, v = times[..., None], a[:, None], v[:, None]
    if rotating:
        return a * np.cos(s) + v * np.sin(s), v * np.cos(s) - a * np.sin(s)
    return a + v * s, v + 0.0 * s


def computed(compiled: bool, rate, rotating: bool, a, v, times) -> np.ndarray:
    """Rates as the program computes them; (cells, times, rates)."""
    points = [x.reshape(-1, DIM) for x in moved(rotating, a, v, times)]
    return np.asarray(mapped(compiled, rate, *points)).reshape(*times.shape, -1)


def on_curves(compiled: bool, rate, rotating: bool, a, v, h, times, order: int):
    """Ends of the polynomial on each interval, at the times."""

    def curve(a, v, h):
        return enclose(rate, TimeInterval(order))(*curved_path(rotating, a.T, v.T, h, order))

    found = jax.jit(curve)(a, v, h) if compiled else by_numpy(curve, a, v, h)
    tau = (2 * times / h[:, None] - 1)[..., None]
    middle = sum(_columns(part) * tau**k for k, part in enumerate(found.parts) if part is not None)
    return middle - _columns(found.error), middle + _columns(found.error)


def _columns(part):
    """Rates by intervals as (cells, 1, rates)."""
    return np.broadcast_to(np.asarray(part), (np.shape(part)[0], CELLS)).T[:, None]


def inside(low, values, high, place, a, v, h, times) -> None:
    """Fail where a value is outside."""
    with np.errstate(invalid="ignore"):
        bad = (values < low) | (values > high) | (np.isnan(values) & np.isfinite(low) & np.isfinite(high))
    if np.any(bad):
        k, t, i = np.argwhere(bad)[0]
        low, high = np.broadcast_to(low, values.shape), np.broadcast_to(high, values.shape)
        raise Violation(
            f"{' '.join(place)}: rate {i} is {values[k, t, i]!r}, outside [{low[k, t, i]!r}, {high[k, t, i]!r}], at time "
            f"{times[k, t]!r} from a={a[k].tolist()}, v={v[k].tolist()}, h={h[k]}"
        )


def exact_rates(rate, rotating: bool, a, v, times) -> dict[int, list[tuple[float, float]]]:
    """The rates at the last time of some cells, by intervals of forty digits; by cell."""
    found = {}
    # Some numbers have more digits than there is memory.
    with contextlib.suppress(NotImplementedError, MemoryError):
        for k in EXACT:
            (values,) = exact.evaluate(rate, *exact.moved(rotating, a[k], v[k], times[k, -1]))
            found[k] = [exact.ends(np.asarray(value, object)) for value in values]
    return found


def held_exactly(low, exactly, high, place, times) -> None:
    """Fail where a rate in exact arithmetic is outside of finite bounds."""
    for k, rates in exactly.items():
        for i, (least, most) in enumerate(rates):
            lo, hi = (np.broadcast_to(end, (*times.shape, len(rates)))[k, -1, i] for end in (low, high))
            if np.all(np.isfinite([lo, hi])) and not lo <= least <= most <= hi:
                raise Violation(
                    f"{' '.join(place)}: rate {i} of cell {k} is in [{least!r}, {most!r}] in exact arithmetic, not in "
                    f"[{lo!r}, {hi!r}]"
                )


def shrunk(tree, seed: int, compiled: bool, message: str):
    """The smallest program within this one that still breaks a bound, and how."""
    while True:
        for other in smaller(tree):
            try:
                attack(other, seed, compiled=compiled)
            except Violation as violation:
                tree, message = other, str(violation)
                break
        else:
            return tree, message


def soak(seed: int, numbers, deadline: float = math.inf, compiled_every: int = 100) -> tuple[Counter, list[dict]]:
    """Attack the programs of these numbers; what was seen, and each violation with its smallest program."""
    seen, broken = Counter(), []
    for number in numbers:
        if time.monotonic() > deadline:
            break
        rng = np.random.default_rng((seed, number))
        tree, place = random_tree(rng, int(rng.integers(1, 7))), int(rng.integers(2**31))
        compiled = number % compiled_every == compiled_every - 1
        try:
            attack(tree, place, seen, compiled)
        except Violation as violation:
            least, message = shrunk(tree, place, compiled, str(violation))
            broken.append({"tree": least, "seed": place, "compiled": compiled, "how": message, "number": number})
        except Exception as error:
            broken.append({"tree": tree, "seed": place, "compiled": compiled, "how": repr(error), "number": number})
        seen["compiled programs"] += compiled
    return seen, broken
