"""The law of a record's response given the parameters, for the families of a contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from fedpdmc.errors import InputError
from fedpdmc.study.contract_tables import PREDICTOR_FAMILIES

if TYPE_CHECKING:
    import pandas as pd

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
    """

    def __init__(self, study: Study, draws: np.ndarray):
        if study.family not in PREDICTOR_FAMILIES:
            raise InputError(
                "sites", f"a study of family {study.family!r}", f"Assessments know {', '.join(PREDICTOR_FAMILIES)}."
            )
        self.study, self.draws = study, np.asarray(draws, float)
        self.coefficients = self.draws[:, : len(study.design.names)]
        sigma = np.exp(self.draws[:, -1]) if study.unknown_scale else study.options.get("scale", 1.0)
        self.scale = np.broadcast_to(sigma, (len(self.draws),))

    def predictor(self, records: pd.DataFrame) -> np.ndarray:
        """The linear predictor of each record at each draw, of shape (n, S)."""
        offset = self.study.options.get("offset")
        moved = 0.0 if offset is None else np.asarray(records[offset], float)[:, None]
        return self.study.design.matrix(records) @ self.coefficients.T + moved

    def law(self, predictor: np.ndarray) -> Any:
        """The distribution of the response, as `scipy.stats` has it."""
        family = self.study.family
        if family == "logistic":
            return stats.bernoulli(_expit(predictor))
        if family == "poisson":
            return stats.poisson(np.exp(np.minimum(predictor, 700.0)))
        if family == "student_t":
            return stats.t(self.study.options["df"], predictor, self.scale)
        return stats.norm(predictor, self.scale)

    def mean(self, predictor: np.ndarray) -> np.ndarray:
        """The expected response."""
        if self.study.family == "logistic":
            return _expit(predictor)
        return np.exp(np.minimum(predictor, 700.0)) if self.study.family == "poisson" else predictor

    def log_density(self, records: pd.DataFrame) -> np.ndarray:
        """Log density of each record's response at each draw, of shape (n, S)."""
        y = self.study.design.response(records)[:, None]
        law = self.law(self.predictor(records))
        return law.logpmf(y) if self.study.family in ("logistic", "poisson") else law.logpdf(y)

    def replicate(self, records: pd.DataFrame, rng: np.random.Generator) -> np.ndarray:
        """A new response of each record under each draw, of shape (n, S)."""
        predictor = self.predictor(records)
        return np.asarray(self.law(predictor).rvs(size=predictor.shape, random_state=rng), float)

    def blocks(self, records: pd.DataFrame) -> Iterator[pd.DataFrame]:
        """The records in blocks that fit into memory beside all draws."""
        size = max(MOST_NUMBERS // max(len(self.draws), 1), 1)
        for start in range(0, len(records), size):
            yield records.iloc[start : start + size]


def _expit(z: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * z)
