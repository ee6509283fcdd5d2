"""An R-style formula over declared columns: the same columns of the design matrix at every site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from formulaic import Formula
from formulaic.parser.types import Factor

from fedpdmc.errors import InputError
from fedpdmc.study.formula_syntax import SUCH_AS, WHERE, check_size

if TYPE_CHECKING:
    from fedpdmc.study.column import Column


class Design:
    """A formula of declared columns and their interactions, without functions.

    Functions in a formula would run code from the contract at the site, and many (``center``, ``poly``) depend on the
    site's records, so that parameters would have different meanings at different sites. Columns are centred, scaled or
    log-transformed in their declaration.

    Parameters
    ----------
    formula : str
        Such as ``outcome ~ treatment * age``.
    columns : dict of Column
    intercept : bool
        Whether the intercept is a column of the design. Without it, levels are still coded against a baseline.
    """

    def __init__(self, formula: str, columns: dict[str, Column], intercept: bool = True):
        self.columns = columns
        check_size(formula, {name: max(len(column.levels), 1) for name, column in columns.items()})
        try:
            parsed: Any = Formula(formula)  # pyright: ignore[reportAbstractUsage]
            left, right = list(parsed.lhs), list(parsed.rhs)
        except Exception as error:
            # The parser was not made for untrusted input: whatever it raises, the formula is not valid.
            raise InputError(WHERE, repr(formula), SUCH_AS) from error
        self.used = {factor.expr for term in [*left, *right] for factor in term.factors if _is_column(factor, columns)}
        if len(left) != 1 or len(left[0].factors) != 1 or str(left[0]) not in columns:
            raise InputError(WHERE, repr(formula), "Give one declared column, the response, left of '~'.")
        self.response_name = str(left[0])
        if any(self.response_name in {factor.expr for factor in term.factors} for term in right):
            raise InputError(WHERE, repr(formula), "The response cannot be on both sides.")
        # The template has every level, so that the design's columns depend on the contract only.
        try:
            self._spec = parsed.rhs.get_model_matrix(self._template(), na_action="raise").model_spec
        except Exception as error:
            raise InputError(WHERE, repr(formula), str(error)[:200]) from error
        whole = list(self._spec.column_names)
        self._kept = [i for i, name in enumerate(whole) if intercept or name != "Intercept"]
        self.names: tuple[str, ...] = tuple(whole[i] for i in self._kept)
        if not self.names:
            raise InputError(WHERE, repr(formula), "Give at least one term.")

    @property
    def largest(self) -> np.ndarray:
        """The largest absolute value of each column of the design that the declared bounds allow."""
        out = np.ones(len(self._spec.column_names))
        for term, index in self._spec.term_indices.items():
            for factor in term.factors:
                column = self.columns.get(factor.expr)
                if column is not None and column.type != "level":
                    out[list(index)] *= max(abs(x) for x in column.range)
        return out[self._kept]

    def products(self, values: Mapping[str, float]) -> np.ndarray:
        """For each column of the design, the product of the values of its factors; 1 for the intercept."""
        out = np.ones(len(self._spec.column_names))
        for term, index in self._spec.term_indices.items():
            for factor in term.factors:
                out[list(index)] *= values.get(factor.expr, 1.0)
        return out[self._kept]

    def _template(self) -> pd.DataFrame:
        most = max([len(column.levels) for column in self.columns.values()] + [2])
        frame = {}
        for name, column in self.columns.items():
            if column.type == "level":
                frame[name] = pd.Categorical(
                    [column.levels[i % len(column.levels)] for i in range(most)], categories=list(column.levels)
                )
            else:
                frame[name] = np.linspace(0.25, 0.75, most)
        return pd.DataFrame(frame)

    def matrix(self, records: pd.DataFrame) -> np.ndarray:
        """The design matrix, of shape (n, d)."""
        if not len(records):
            return np.zeros((0, len(self.names)))
        found = self._spec.get_model_matrix(records, na_action="raise")
        if tuple(found.columns) != tuple(self._spec.column_names):
            raise InputError(WHERE, "columns that depend on the records", "Please report this formula.")
        return np.ascontiguousarray(found.to_numpy()[:, self._kept], dtype=np.float64)

    def response(self, records: pd.DataFrame) -> np.ndarray:
        """The response as numbers; 0 and 1 for the first and second level."""
        column = records[self.response_name]
        if self.columns[self.response_name].type == "level":
            return column.cat.codes.to_numpy(dtype=np.float64)
        return column.to_numpy(dtype=np.float64)

    def check_response(self, family: str) -> None:
        """Refuse a response that does not fit the family."""
        column = self.columns[self.response_name]
        binary = column.type == "level" and len(column.levels) == 2
        plain = column.center == 0 and column.scale == 1 and not column.log
        good = {
            "logistic": binary,
            "poisson": column.type == "count" and plain,
            "negative_binomial": column.type == "count" and plain,
            "linear": column.type == "number",
            "student_t": column.type == "number",
        }[family]
        if not good:
            count = "a count, neither centred nor scaled"
            need = {"logistic": "a level of two", "poisson": count, "negative_binomial": count}.get(family, "a number")
            found = f"{len(column.levels)} levels" if column.type == "level" else column.type
            raise InputError(f"study.toml: columns: {column.name}", found, f"The response of {family} is {need}.")


def columns_of(formula: str) -> tuple[str, list[str]]:
    """The response and the other columns of a formula, before anything is declared."""
    check_size(formula, {})
    try:
        parsed: Any = Formula(formula)  # pyright: ignore[reportAbstractUsage]
        left, right = list(parsed.lhs), list(parsed.rhs)
    except Exception as error:
        raise InputError("formula", repr(formula), SUCH_AS) from error
    found = [factor.expr for term in right for factor in term.factors if factor.eval_method is Factor.EvalMethod.LOOKUP]
    if len(left) != 1 or len(left[0].factors) != 1:
        raise InputError("formula", repr(formula), "Give one column, the response, left of '~'.")
    return str(left[0]), list(dict.fromkeys(found))


def _is_column(factor: Factor, columns: dict[str, Column]) -> bool:
    """Whether a factor is a declared column. Constants are not; anything else is refused."""
    if factor.eval_method is Factor.EvalMethod.LITERAL:
        return False
    if factor.eval_method is not Factor.EvalMethod.LOOKUP:
        raise InputError(
            WHERE,
            repr(factor.expr),
            "Functions are not evaluated: name columns only, and set center, scale or log where a column is declared.",
        )
    if factor.expr not in columns:
        raise InputError(WHERE, repr(factor.expr), "Declare this column under [columns].")
    return True
