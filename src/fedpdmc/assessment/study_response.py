"""The law of a record's response given the parameters, for the families of a contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fedpdmc.assessment.response_distributions import LAWS, Law, law_of
from fedpdmc.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.study.column import Column
    from fedpdmc.study.contract import Study

# Numbers in a block of records by draws.
MOST_NUMBERS = 4_000_000


class Outcome:
    """The response of the records of a study, in the units of the model.

    Parameters
    ----------
    study : Study
    draws : array of shape (S, d)
        Of the study's parameters.
    site : str, optional
        Whose constants are used, where a model has some; the first site's if None.
    """

    def __init__(self, study: Study, draws: np.ndarray, site: str | None = None):
        if study.family not in LAWS:
            raise InputError("sites", f"a study of family {study.family!r}", f"Assessments know {', '.join(LAWS)}.")
        if study.effects is not None:
            raise InputError(
                "sites", "effects of groups in the formula", "They stay at their sites: assess a formula without them."
            )
        self.study, self.draws = study, np.asarray(draws, float)
        terms = len(study.design.names)
        self._entries = 1 if study.model is None else sum(one.type.size for one in study.model.model.source.predictors)
        shape = (len(self.draws), self._entries, terms)
        self._coefficients = self.draws[:, : self._entries * terms].reshape(shape)
        self._other = self.draws[:, self._entries * terms :]
        self._constants = {} if study.model is None else study.model.constants_of(site or study.sites[0])

    @property
    def response(self) -> Column:
        """The declaration of the response."""
        return self.study.columns[self.study.design.response_name]

    def law(self, records: pd.DataFrame) -> Law:
        """The law of the response of each record at each draw."""
        offset, X = self.study.options.get("offset"), self.study.design.matrix(records)
        eta = np.einsum("np,skp->nsk", X, self._coefficients, optimize=True)
        if offset is not None:
            eta += np.asarray(records[offset], float)[:, None, None]
        vector = self.study.family == "multinomial_logit"
        options = self.study.options
        return law_of(self.study.family, eta if vector else eta[..., 0], self._other, self._constants, options)

    def observed(self, records: pd.DataFrame) -> np.ndarray:
        """The responses, of shape (n, 1)."""
        return self.study.design.response(records)[:, None]

    def own(self, records: pd.DataFrame) -> dict[str, np.ndarray]:
        """The family's columns other than those of the linear predictor, by the family's names for them."""
        if self.study.model is None:
            return {}
        found = {}
        for name, column in self.study.model.columns.items():
            values = records[column]
            codes = values.cat.codes if self.study.columns[column].type == "level" else values
            found[name] = np.asarray(codes, float)[:, None]
        return found

    def mean(self, records: pd.DataFrame) -> np.ndarray:
        """The expected response of each record at each draw, (n, S); of levels their probabilities, (n, S, K)."""
        return self.law(records).mean()

    def log_density(self, records: pd.DataFrame) -> np.ndarray:
        """Log density of each record's response at each draw, of shape (n, S)."""
        return self.law(records).log_density(self.observed(records), self.own(records))

    def draw(self, records: pd.DataFrame, rng: np.random.Generator) -> np.ndarray:
        """A new response under each draw, of shape (n, S); a time until the event itself."""
        return self.law(records).draw(self.own(records), rng)

    def blocks(self, records: pd.DataFrame) -> Iterator[pd.DataFrame]:
        """The records in blocks that fit into memory together with all draws."""
        pieces = max(self._entries + 1, self._other.shape[1], 1)
        size = max(MOST_NUMBERS // (pieces * max(len(self.draws), 1)), 1)
        for start in range(0, len(records), size):
            yield records.iloc[start : start + size]
