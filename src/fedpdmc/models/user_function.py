"""Models given as a JAX function, whose number of parameters may not be known yet."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import compiled, mapped, on_device
from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.programs import equations
from fedpdmc.enclosures import not_finite_at
from fedpdmc.errors import GUARD, InputError
from fedpdmc.potentials import LatentProgram, LinearPredictor, Potential, Program, RandomEffects, bare
from fedpdmc.potentials.base import public_points
from fedpdmc.potentials.padding import Unpaddable, bucket, pad


class Variables:
    """Named variables such as a scale, whose logarithm is a coordinate, or a vector of several coordinates.

    Parameters
    ----------
    parts : list of (index, constrain)
        The coordinates that a model takes, and the function from them to its variables.
    others : dict
        Coordinates that no such model takes, by name.
    """

    def __init__(self, parts: list[tuple[np.ndarray, Callable]], others: dict[str, int]):
        self.parts, self.others = parts, others

    @double_precision
    def of(self, draws: np.ndarray) -> dict[str, np.ndarray]:
        """Variables of shape (chains, n, …) by name at draws of shape (chains, n, d)."""
        found: dict[str, np.ndarray] = {}
        for index, constrain in self.parts:
            names: list[str] = []

            def values(x, constrain=constrain, names=names):
                # As a tuple, since JAX would sort a dict.
                named = constrain(x)
                names[:] = list(named)
                return tuple(named.values())

            arrays = jax.jit(mapped(mapped(values)))(jnp.asarray(draws[..., index]))
            found |= {name: np.asarray(array) for name, array in zip(names, arrays, strict=True)}
        return found | {name: draws[..., i] for name, i in self.others.items()}

    def at_origin(self, origin: np.ndarray) -> dict[str, np.ndarray]:
        """Variables of shape (chains, 1, …) where the chains start."""
        return self.of(origin)

    def before(self, f: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
        """A function of variables by name as one of the coordinates."""

        def of_coordinates(x):
            found = {name: x[i] for name, i in self.others.items()}
            for index, constrain in self.parts:
                found |= constrain(x[jnp.asarray(index)])
            return f(found)

        return of_coordinates


class StoredVariables:
    """Draws of variables from disk, where the functions that made them are not.

    Parameters
    ----------
    values : dict
        Arrays of shape (chains, N, …), equally spaced in process time.
    origin : dict, optional
        Arrays of shape (chains, 1, …) where the chains start; the first draws if None.
    """

    def __init__(self, values: dict[str, np.ndarray], origin: dict[str, np.ndarray] | None = None):
        self.values, self.origin = values, origin

    def at_origin(self, origin: np.ndarray) -> dict[str, np.ndarray]:
        """Variables of shape (chains, 1, …) where the chains start."""
        return {name: value[:, :1] for name, value in self.values.items()} if self.origin is None else self.origin

    def of(self, draws: np.ndarray) -> dict[str, np.ndarray]:
        """As many of the stored draws as ``draws`` has, equally spaced, or all of them if that is fewer."""
        kept = min(value.shape[1] for value in self.values.values())
        rows = np.unique(np.linspace(0, kept - 1, draws.shape[1]).round().astype(int))
        return {name: value[:, rows] for name, value in self.values.items()}

    def before(self, f: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
        """Refused: what makes variables of coordinates is not on disk."""
        raise InputError(
            "named", "a posterior that was read from disk", "Average over post.variables(n), which has their draws."
        )


def scalars(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every entry of every variable as an array of its own, of shape (chains, n), named like ``beta[0]``."""
    entries: dict[str, np.ndarray] = {}
    for name, value in values.items():
        for index in np.ndindex(value.shape[2:]):
            label = f"{name}[{','.join(map(str, index))}]" if index else name
            entries[label] = value[(slice(None), slice(None), *index)]
    return entries


def coordinate_names(sites: Sequence[Any], dim: int) -> list[str] | None:
    """Names of the coordinates from the models that have them; None if none has."""
    names: list[str | None] = [None] * dim
    for index, site, model in _naming(sites, dim):
        for i, name in zip(index, model.names or (), strict=True):
            if names[i] not in (None, name):
                raise InputError(
                    f"sites ({site!r})",
                    f"the name {name!r} for coordinate {i}, which another site calls {names[i]!r}",
                    "Give all sites models with the same variables in the same order, or say with coordinates= which "
                    "entries each depends on.",
                )
            names[i] = name
    if all(name is None for name in names):
        return None
    return [f"x{i}" if name is None else name for i, name in enumerate(names)]


def variables(sites: Sequence[Any], names: list[str]) -> Variables | None:
    """The variables of the sites' models, each taken from the first site that has it; None if no model has any."""
    parts, seen, taken = [], set(), set()
    for index, _, model in _naming(sites, len(names)):
        key = (tuple(index), model.names)
        if key not in seen and model.constrain is not None:
            seen.add(key)
            taken |= set(index.tolist())
            own = tuple(names[i] for i in index)
            renamed = own != model.names and hasattr(model.constrain, "named")
            parts.append((index, model.constrain.named(own) if renamed else model.constrain))
    if not parts:
        return None
    return Variables(parts, {name: i for i, name in enumerate(names) if i not in taken})


def _naming(sites: Sequence[Any], dim: int) -> Iterator[tuple[np.ndarray, str, Any]]:
    """The coordinates, the site's name and the model of each site whose model names its variables."""
    for site in sites:
        if site.federation is not None and site.naming is None:
            continue
        model = site.naming or (site.potential if site.model is None else site.model)
        if getattr(model, "names", None) is not None:
            yield np.arange(dim) if site.coordinates is None else site.coordinates, site.name, model


logger = logging.getLogger("fedpdmc.site")

CALL = "Site(potential)"
# Up to so many records, all sites share the program that computes derivatives, and it computes so many together.
FEW_RECORDS, TOGETHER = 1024, 16
SHOULD = "Give a JAX function f(x, data) that returns the minus log likelihood, a number."


@dataclasses.dataclass(frozen=True, eq=False)
class UserModel:
    """A minus log likelihood ``f(x, data)``.

    Attributes
    ----------
    function : callable
        ``f(x, data)``, in JAX; functions that are equal share compiled work between sites.
    data : pytree of arrays
        Floating ones in 64 bits.
    dim : int or None
        Number of parameters, where the model says it.
    names : tuple of str or None
        The parameters' names, where the model has them.
    constrain : callable or None
        From the parameters, of shape (d,), to the model's variables by name.
    latent_names : tuple of str
        Of private latents. The function then takes parameters and latents as one vector.
    """

    function: Callable[[Any, Any], Any]
    data: Any
    dim: int | None = None
    names: tuple[str, ...] | None = None
    constrain: Callable[[Any], dict[str, Any]] | None = None
    latent_names: tuple[str, ...] = ()

    @property
    def records(self) -> int:
        """The longest first axis among the data: a guess that decides how far plans reach, and nothing else."""
        return max((leaf.shape[0] for leaf in jax.tree.leaves(self.data) if leaf.ndim), default=0)

    @double_precision
    def sized(self, dim: int, name: str) -> Potential:
        """The potential of ``dim`` parameters, for site ``name``; it is traced once to see that it can be used."""
        if self.dim is not None and self.dim != dim:
            raise InputError(
                f"sites ({name!r})",
                f"a model of {self.dim} parameters where the federation has {dim}",
                "Give all sites models of the same parameters, or say with coordinates= which ones a site depends on.",
            )
        width = dim + len(self.latent_names)
        _check(self, width, name)
        program = Program(self.function, self.data, width, records=self.records)
        return LatentProgram(program, len(self.latent_names), self.records) if self.latent_names else program

    @property
    def family(self) -> Any:
        """Equal for models of the same function whose data have the same structure, whatever their sizes."""
        function: Any = self.function
        if hasattr(function, "rest"):
            function = dataclasses.replace(function, rest=())
        return function, jax.tree.structure(self.data), self.dim

    @double_precision
    def padded(self, dim: int, name: str, size: int) -> Potential | None:
        """The potential with its records padded to ``size``, None where it is not known how; all records count once."""
        if self.latent_names:
            return None
        try:
            function, data = pad(self.function, self.data, dim, size)
        except Unpaddable as reason:
            logger.info("site %r is compiled for its own number of records: %s", name, reason)
            return None
        return Program(function, data, dim, records=size)


@dataclasses.dataclass(frozen=True)
class Bound:
    """``f`` with the parts of its data that are no arrays put back: numbers that it may need while it is traced."""

    function: Callable[[Any, Any], Any]
    rest: tuple[Any, ...]
    structure: Any

    def __call__(self, x, arrays):
        """``f(x, data)``."""
        return self.function(x, rejoin(arrays, self.rest, self.structure))


@dataclasses.dataclass(frozen=True)
class Alone:
    """A function of the parameters only, as one of parameters and data."""

    function: Callable[[Any], Any]

    def __call__(self, x, data):
        """``f(x)``."""
        return self.function(x)


@dataclasses.dataclass(frozen=True)
class WithLatents:
    """``f(x, z, data)`` as a function of one vector, parameters first, and data."""

    function: Callable[..., Any]
    shape: tuple[int, ...]
    alone: bool

    def __call__(self, w, data):
        """``f(x, z, data)``, or ``f(x, z)`` without data."""
        count = math.prod(self.shape)
        x, z = w[: w.shape[0] - count], w[w.shape[0] - count :].reshape(self.shape)
        return self.function(x, z) if self.alone else self.function(x, z, data)


@dataclasses.dataclass(frozen=True)
class Minus:
    """``−f``."""

    function: Callable[[Any, Any], Any]

    def __call__(self, x, data):
        """``−f(x, data)``."""
        return -self.function(x, data)


@double_precision
def user_model(function: Callable, data: Any = None, latent: Any = None) -> UserModel:
    """A user's function with its data; without data it is called as ``f(x)``, with latents as ``f(x, z, data)``."""
    names: tuple[str, ...] = ()
    try:
        hash(function)
    except TypeError:
        remedy = "Give a function, or an object with a __hash__ of its own: compiled work is kept by function."
        raise InputError("Site(potential)", f"a {type(function).__name__} that cannot be hashed", remedy) from None
    if latent is not None:
        shape, names = _latents(latent)
        function = WithLatents(function, shape, data is None)
    if data is None:
        return UserModel(function if names else Alone(function), (), latent_names=names)
    arrays, rest, structure = take_apart("data", data)
    if all(part is None for part in rest):
        return UserModel(function, jax.tree.unflatten(structure, arrays), latent_names=names)
    return UserModel(Bound(function, rest, structure), arrays, latent_names=names)


def _latents(latent: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Shape and names of private latents: from a number, a shape, or names."""
    remedy = "Give how many numbers, such as 12; their shape, such as (12, 2); or a list of names."
    if isinstance(latent, (int, np.integer)) and not isinstance(latent, bool):
        shape: tuple[int, ...] = (int(latent),)
    elif isinstance(latent, tuple) and latent and all(isinstance(n, (int, np.integer)) for n in latent):
        shape = tuple(int(n) for n in latent)
    elif isinstance(latent, (list, tuple)) and latent and all(isinstance(name, str) for name in latent):
        if len(set(latent)) != len(latent):
            raise InputError("Site(latent)", "a name that occurs twice", "Name each latent once.")
        return (len(latent),), tuple(map(str, latent))
    else:
        raise InputError("Site(latent)", repr(latent), remedy)
    if min(shape) < 1:
        raise InputError("Site(latent)", repr(latent), remedy)
    return shape, tuple(f"z[{','.join(map(str, index))}]" for index in np.ndindex(shape))


def take_apart(argument: str, data: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """The arrays among the leaves of ``data``, the other leaves (None where there is an array), and the structure.

    Python numbers, strings and None stay as they are: a model may need them while it is traced, as sizes for instance.
    """
    leaves, structure = jax.tree.flatten(data, is_leaf=lambda leaf: leaf is None)
    arrays, rest = [], []
    for leaf in leaves:
        if leaf is None or isinstance(leaf, (bool, int, float, complex, str)):
            rest.append((leaf,))
            continue
        arrays.append(_array(argument, leaf))
        rest.append(None)
    return tuple(arrays), tuple(rest), structure


def rejoin(arrays, rest, structure) -> Any:
    """The inverse of `take_apart`."""
    left = iter(arrays)
    return jax.tree.unflatten(structure, [next(left) if part is None else part[0] for part in rest])


def _array(argument: str, leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array):
        array = leaf
    else:
        array = np.asarray(leaf)
        if array.dtype.kind not in "biuf":
            raise InputError(
                argument, f"a {type(leaf).__name__} that is not an array of numbers", "Give a pytree of numeric arrays."
            )
    # A copy: JAX may keep the memory of a NumPy array, which its owner can change.
    return jnp.array(array, float) if jnp.issubdtype(array.dtype, jnp.floating) else jnp.array(array)


def _check(model: UserModel, dim: int, name: str) -> None:
    """Raise unless the function can be traced and differentiated, and returns a floating-point number."""
    x = jax.ShapeDtypeStruct((dim,), jnp.float64)
    where = f"sites ({name!r})"
    try:
        closed, value = jax.make_jaxpr(lambda *args: model.function(*args), return_shape=True)(x, model.data)
    except Exception as error:
        raise InputError(
            where,
            f"a model that raises {type(error).__name__} at parameters of shape ({dim},): {str(error).splitlines()[0]}",
            SHOULD,
        ) from error
    if _draws(closed.jaxpr):
        raise InputError(
            where, "a model that draws random numbers with jax.random", "Draw them once and give them to it as data."
        )
    shape = getattr(value, "shape", None)
    if shape != ():
        found = type(value).__name__ if shape is None else f"shape {shape}"
        raise InputError(where, f"a model with values of {found}", "Return a number: sum over the records.")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise InputError(where, f"a model with values of type {value.dtype}", "Return a floating number.")
    try:
        jax.eval_shape(jax.grad(model.function), x, model.data)
    except Exception as error:
        raise InputError(
            where,
            f"a model without a gradient: {type(error).__name__}: {str(error).splitlines()[0]}",
            "Write it with functions that JAX can differentiate.",
        ) from error


def _draws(jaxpr: Any) -> bool:
    """Whether a program, or one within it, draws random numbers."""
    return any(equation.primitive.name.startswith("random_") for equation in equations(jaxpr))


def derivatives_of(potential: Potential, x, spread=None):
    """Value, gradient and Hessian, compiled once for each kind and shape of potential; with a spread their averages."""
    if isinstance(potential, LinearPredictor):
        rows = potential.design.shape[0]
        size = max(bucket(rows), FEW_RECORDS)
        return _derivatives_of(
            potential.padded(size), x, spread, on_device(float(0 if potential.diagonal else size - rows))
        )
    if not isinstance(potential, (Program, RandomEffects)):
        return _derivatives_of(potential, x, spread)
    together = TOGETHER if isinstance(potential, Program) and potential.records <= FEW_RECORDS else 1
    points, weights, parts, still = _rule(x.shape[0], together, spread is None, jax.dtypes.canonicalize_dtype(float))
    spread = still if spread is None else spread
    if isinstance(potential, RandomEffects):
        # Straight or bent: compiled once for both.
        potential, average = potential.bendable(), _averaged_effects
    else:
        average = _averaged
    return average(potential, on_device(x), on_device(spread), points, weights, parts)


@functools.lru_cache(64)
def _rule(dim: int, together: int, one: bool, dtype: np.dtype) -> tuple[jax.Array, ...]:
    """Points, weights, how many parts of them are used, and a spread of zero: for an average, or for one point.

    The latter is an average over one point: a program is read or compiled once for both.
    """
    points, weights = public_points(dim)
    parts = -(-len(weights) // together)
    points = np.resize(np.concatenate([points, 0 * points]), (parts, together, dim))
    weights = np.pad(weights, (0, parts * together - len(weights))).reshape(parts, together)
    if one:
        points, weights, parts = 0 * points, np.eye(1, together).repeat(parts, 0), 1
    points, weights, still = (on_device(np.asarray(part, dtype)) for part in (points, weights, np.zeros((dim, dim))))
    return points, weights, on_device(parts), still


@once
def _derivatives_of(potential: Potential, x, spread, appended=None):
    """Less the values of records that padding has appended, of which the predictor is zero, and the response."""
    if spread is not None:
        value, gradient, hessian = potential.averaged(x, spread)
    else:
        value, gradient, hessian = potential.value(x), potential.gradient(x), potential.hessian(x)
    if appended is not None:
        assert isinstance(potential, LinearPredictor)
        # With weights those of appended records are zero.
        value = value - appended * (
            potential.loss.value(jnp.zeros(()), jnp.zeros(())) if potential.weight is None else 0
        )
    return value, gradient, hessian


def _average(potential: Program | RandomEffects, x, spread, points, weights, count):
    """Means over the first parts of the points."""

    def add(i, total):
        found = mapped(potential.derivatives, getattr(potential, "calls_library", False))(x + points[i] @ spread.T)
        return jax.tree.map(lambda one, other: one + jnp.tensordot(weights[i], other, 1), total, found)

    return jax.lax.fori_loop(0, count, add, (jnp.zeros(()), jnp.zeros_like(x), jnp.zeros_like(spread)))


# Effects are integrated out by many small steps, which NumPy is slow at.
_averaged, _averaged_effects = once(_average), compiled(_average, quickly=True)


@double_precision
def check_start(potential: Potential, x: np.ndarray, name: str) -> None:
    """Raise unless value and gradient are finite where the chains start."""
    # All arguments as the search for the mode has them: it is then compiled once.
    value, gradient, _ = derivatives_of(bare(potential), jnp.asarray(x), None)
    if not (np.isfinite(value) and np.all(np.isfinite(gradient))):
        what = "value" if not np.isfinite(value) else "gradient"
        where = not_finite_at(potential.value, x)
        raise InputError(
            f"sites ({name!r})",
            f"a model whose {what} is not finite at the start {np.asarray(x)[:4]}" + (f": {where}" if where else ""),
            f"Give init=, a point at which every site's likelihood is finite. {GUARD}",
        )


# Captured values -------------------------------------------------------------------------------------------------------


# Functions that read what is not among their arguments: compiled work is kept by function, so that must not change.

# A number in the key of JAX's cache of traced functions: with a new one they are traced again.
_TRACE = jax.make_user_context(0) if hasattr(jax, "make_user_context") else None
_NUMBERS = itertools.count(1)
# Hashes of users' functions when they were first traced, by function, and by the arguments they were traced with.
_SEEN: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


@double_precision
def check_unchanged(model: UserModel, dim: int, name: str) -> None:
    """Refuse a function that is traced to another program than before in this process.

    A function may close over numbers and arrays or read them from its module. They become a part of the program that is
    compiled, and programs are kept by function: with other values the old program would run.

    It is traced twice, the second time without what JAX remembers of compiled functions that it calls. A function that is
    traced to another program then has bounds of one program and rates of another.

    Raises
    ------
    InputError
        If the function reads something that has changed, or that changes whenever it is called.
    """
    found = program_digest(model, dim)
    own, wrappers = _innermost(model.function)
    with _traced_anew():
        again = program_digest(model, dim)
    if again != found:
        raise InputError(
            f"sites ({name!r})",
            f"the function {getattr(own, '__name__', own)!r}, which is not the same whenever it is traced: it draws "
            "random numbers, changes a value that it reads, or calls a jax.jit function that read another value before",
            "Draw random numbers once and give them as data; give what changes as data; keep no state in the function.",
        )
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(model.data)]
    kind = repr((wrappers, dim, str(jax.tree.structure(model.data)), shapes))
    try:
        seen = _SEEN.setdefault(own, {})
    except TypeError:
        return
    if seen.setdefault(kind, found) != found:
        raise InputError(
            f"sites ({name!r})",
            f"the function {getattr(own, '__name__', own)!r}, which reads a value that has changed since it was first used",
            "Give what changes as data, or define a new function: compiled work is kept by function.",
        )


@double_precision
def program_digest(model: UserModel, dim: int) -> str:
    """A hash of the program that a user's function is traced to, with the values that it reads; not of its data."""
    x = jax.ShapeDtypeStruct((dim + len(model.latent_names),), jnp.float64)
    # A new function each time: JAX remembers what it has traced too.
    closed = jax.make_jaxpr(lambda *args: model.function(*args))(x, model.data)
    digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr)).encode())
    for const in closed.consts:
        digest.update(np.ascontiguousarray(const).tobytes())
    return digest.hexdigest()


def _traced_anew() -> contextlib.AbstractContextManager[Any]:
    """A context in which functions under `jax.jit` are traced again."""
    return contextlib.nullcontext() if _TRACE is None else _TRACE(next(_NUMBERS))


def _innermost(function: Any) -> tuple[Any, list[Any]]:
    """The user's own function, and what it was wrapped in."""
    wrappers = []
    while True:
        inner = getattr(function, "function", None) or getattr(function, "model", None)
        if inner is None or not type(function).__module__.startswith("fedpdmc."):
            return function, wrappers
        wrappers.append(
            (type(function).__name__, getattr(function, "part", None), repr(getattr(function, "rest", None)))
        )
        function = inner
