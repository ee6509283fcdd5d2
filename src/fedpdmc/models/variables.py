"""The variables of a user's model, as functions of the coordinates in which it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.mapped import mapped
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError


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
