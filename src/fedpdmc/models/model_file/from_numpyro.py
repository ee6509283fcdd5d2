"""A NumPyro model of records in a plate as the parts of a model file: one record's likelihood, prior and variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc.errors import InputError

CALL = "Model.from_numpyro(model)"
# Relative difference of a value of two records and of the sum of both: rounding.
ROUNDING = 1e-9


def parts_of(model: Callable, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Model` for a NumPyro model, as `Model.from_numpyro` takes it."""
    from fedpdmc.models import from_numpyro

    kinds: dict[str, Any] = {}
    for name, given in columns.items():
        kinds |= dict(given) if isinstance(given, Mapping) else {name: given}

    def arrays(*rows: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments for some records."""
        found = {}
        for name, given in columns.items():
            members = list(given) if isinstance(given, Mapping) else None
            entries = [row[name] if members is None else jnp.stack([row[m] for m in members]) for row in rows]
            found[name] = jnp.stack(entries)
        return found

    rows = [_usual(kinds, value) for value in (0.3, 0.6)]
    one, two = from_numpyro(model, arrays(rows[0])), from_numpyro(model, arrays(*rows))
    if one.names != two.names:
        raise InputError(
            CALL, "latent variables for each record", "Put them outside the plate, or sum them out of the likelihood."
        )
    function: Any = one.function
    latents = function.latents
    labels = {latent.name: latent.name if latent.real else f"{latent.name}_unconstrained" for latent in latents}

    def flat(x: Mapping[str, Any]) -> Any:
        return jnp.concatenate([jnp.ravel(x[labels[latent.name]]) for latent in latents])

    def likelihood(x: Mapping[str, Any], *records: Mapping[str, Any]) -> Any:
        return function(flat(x), tuple(jax.tree.leaves(arrays(*records))))

    _check_sum(likelihood, {labels[latent.name]: latent.shape for latent in latents}, rows)
    prior = from_numpyro(model, arrays(rows[0]), part="prior")
    assert one.constrain is not None
    constrain = one.constrain
    return {
        "function": likelihood,
        "parameters": {labels[latent.name]: latent.shape for latent in latents},
        "columns": kinds,
        "variables": lambda x: dict(constrain(flat(x))),
        "prior": lambda x: prior.function(flat(x), prior.data),
    }


def _usual(kinds: Mapping[str, Any], value: float) -> dict[str, Any]:
    """A record within its domains."""
    whole = ("binary", "count")
    return {
        name: np.asarray(0 if isinstance(kind, int) else float(value > 0.5) if kind in whole else value)
        for name, kind in kinds.items()
    }


def _check_sum(likelihood: Callable, shapes: Mapping[str, tuple[int, ...]], rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a likelihood of two records that is not the sum of those of each."""
    for at in (0.1, -0.4):
        x = {name: jnp.full(shape, at) for name, shape in shapes.items()}
        whole, parts = float(likelihood(x, *rows)), [float(likelihood(x, row)) for row in rows]
        if not abs(whole - sum(parts)) <= ROUNDING * (1 + abs(whole)):
            raise InputError(
                CALL, "a likelihood of two records that is not the sum of both", "Give a model of independent records."
            )
