"""The law of a record's response given the parameters, for the families of a contract."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.models.families import FAMILIES, Law
from fedpdmc.models.model_file.records import CONSTANTS

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.study.contract import Study
    from fedpdmc.study.schema import Column

# Numbers in a block of records by draws.
MOST_NUMBERS = 4_000_000
# The same in a compiled block, whose arrays stay in the processor's cache.
COMPILED_NUMBERS = 2**18


# What a survival family has at a time; the median needs none.
OF_TIMES = ("survival", "hazard", "restricted_mean")


def own_units(values: np.ndarray, response: Column) -> np.ndarray:
    """Values of a standardised response in its own units."""
    return values * response.scale + response.center if response.type == "number" else values


@functools.partial(jax.jit, static_argnums=0)
def _log_density(terms: Callable[..., Any], draws: Any, rows: Any, constants: Any, first: Any, weight: Any) -> Any:
    """Weighted log densities of shape (B, S), given those at the first draw."""
    data = {**rows, CONSTANTS: constants}
    level = first + weight * terms(draws[0], data)
    return level[:, None] - weight[:, None] * jax.vmap(lambda x: terms(x, data), out_axes=1)(draws)


class Outcome:
    """The response of the records of a study, in the units of the model.

    ``draws`` (S, d) are of the study's parameters. Constants are those of ``site``, or of the first site if None.
    """

    def __init__(self, study: Study, draws: np.ndarray, site: str | None = None):
        if study.family not in FAMILIES:
            raise InputError("sites", f"a study of family {study.family!r}", f"Assessments know {', '.join(FAMILIES)}.")
        if study.effects is not None:
            remedy = "They stay at their sites: assess a formula without them."
            raise InputError("sites", "effects of groups in the formula", remedy)
        self.study, self.draws, self.site = study, np.asarray(draws, float), site
        terms = len(study.design.names)
        self._entries = study.model.entries
        shape = (len(self.draws), self._entries, terms)
        self._coefficients = self.draws[:, : self._entries * terms].reshape(shape)
        self._other = self.draws[:, self._entries * terms :]
        self._constants = study.model.constants_of(site or study.sites[0]) | {"trials": study.model.trials}

    @property
    def response(self) -> Column:
        """The declaration of the response."""
        return self.study.columns[self.study.design.response_name]

    def law(self, records: pd.DataFrame) -> Law:
        """The law of the response of each record at each draw."""
        offset, X = self.study.offset(records), self.study.design.matrix(records)
        eta = np.einsum("np,skp->nsk", X, self._coefficients, optimize=True)
        if offset is not None:
            eta += offset[:, None, None]
        vector = self.study.family == "multinomial_logit"
        return FAMILIES[self.study.family].law(eta if vector else eta[..., 0], self._other, self._constants)

    def observed(self, records: pd.DataFrame) -> np.ndarray:
        """The responses, of shape (n, 1)."""
        return self.study.design.response(records)[:, None]

    def own(self, records: pd.DataFrame) -> dict[str, np.ndarray]:
        """The family's columns other than those of the linear predictor, by the family's names for them."""
        return {name: values[:, None] for name, values in self.study.model.values(records).items()}

    def log_density(self, records: pd.DataFrame) -> np.ndarray:
        """Log density of each record's response at each draw, times its weight, of shape (n, S)."""
        found = self.law(records).log_density(self.observed(records), self.own(records))
        return self.study.record_weights(records)[:, None] * found

    def expected(self, records: pd.DataFrame, kind: str, at: float) -> np.ndarray:
        """The mean, or of survival families what `predict` knows at a time, in the response's own units."""
        law, response = self.law(records), self.response
        if kind == "mean":
            return own_units(law.mean(), response)
        if law.of is None:
            raise InputError("kind", repr(kind), f"It is of survival families, not of {self.study.family}.")
        found = law.of(kind, (at - response.center) / response.scale)
        if kind in ("survival", "hazard"):
            return found if kind == "survival" else found / response.scale
        return own_units(found, response)

    def compiled(self, records: pd.DataFrame) -> Iterator[tuple[np.ndarray, Any]]:
        """Log densities by compiled blocks of one size, which all sites share: the records' places, and an array (B, S).

        The last block is filled up with copies of the first record. What does not depend on parameters comes from the law
        at the first draw. Needs 64-bit types.
        """
        n, study = len(records), self.study
        first = Outcome(self.study, self.draws[:1], self.site).log_density(records)[:, 0]
        model = study.model.terms(records, self.site or study.sites[0], study.design.matrix(records))
        constants, weight = model.data[CONSTANTS], study.record_weights(records)
        rows = {key: np.asarray(value) for key, value in model.data.items() if key != CONSTANTS}
        size = max(2 ** int(np.log2(COMPILED_NUMBERS / len(self.draws))), 16)
        draws = jnp.asarray(self.draws)
        for start in range(0, n, size):
            at = np.arange(start, start + size)
            at = np.where(at < n, at, 0)
            block = {key: value[at] for key, value in rows.items()}
            yield at[: n - start], _log_density(model.function.terms, draws, block, constants, first[at], weight[at])

    def draw(self, records: pd.DataFrame, rng: np.random.Generator) -> np.ndarray:
        """A new response under each draw, of shape (n, S); a time until the event itself."""
        return self.law(records).draw(self.own(records), rng)

    def blocks(self, records: pd.DataFrame) -> Iterator[pd.DataFrame]:
        """The records in blocks that fit into memory together with all draws."""
        pieces = max(self._entries + 1, self._other.shape[1], 1)
        size = max(MOST_NUMBERS // (pieces * max(len(self.draws), 1)), 1)
        for start in range(0, len(records), size):
            yield records.iloc[start : start + size]


class Responses(NamedTuple):
    """The responses of a site in this process."""

    study: Study
    site: str
    records: pd.DataFrame

    def groups(
        self, draws: np.ndarray, log_density: bool, predictive: bool, rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """What was ``observed``, and for each record and draw its log density, weighted, and a new response."""
        outcome = Outcome(self.study, draws, self.site)
        one, parts = outcome.response, {"observed": [], "log_likelihood": [], "predictive": []}

        def own(values: np.ndarray) -> np.ndarray:
            if one.type != "number":
                return values.astype(np.int64)
            values = values * one.scale + one.center
            return np.exp(values) if one.log else values

        for block in outcome.blocks(self.records):
            law, y, other = outcome.law(block), outcome.observed(block), outcome.own(block)
            parts["observed"].append(own(y)[:, 0])
            if log_density:
                stretch = np.log(one.scale) + (np.log(own(y)) if one.log else 0.0)
                weight = self.study.record_weights(block)[:, None]
                parts["log_likelihood"].append(weight * (law.log_density(y, other) - stretch))
            if predictive:
                parts["predictive"].append(own(law.draw(other, rng)))
        return {name: np.concatenate(blocks) for name, blocks in parts.items() if blocks}
