"""Which formulas a contract takes: names and operators, without functions, and a design that is not too large."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fedpdmc.errors import InputError

WHERE = "study.toml: model: formula"
SUCH_AS = "Give a formula such as 'outcome ~ treatment + age', with names that have spaces in backticks."
MOST_CHARACTERS, MOST_COLUMNS, MOST_POWER = 2000, 2048, 8
TOKEN = re.compile(r"\s*(\*\*|%in%|`[^`]+`|[\w.]+|[-+*:/^()~])")
# Precedence of operators; '**' and '^' bind most tightly.
BINDING = {"~": 0, "+": 2, "-": 2, "*": 3, "/": 3, ":": 4, "%in%": 4, "**": 5, "^": 5}


def check_size(formula: str, widths: Mapping[str, int]) -> None:
    """Refuse a formula whose design would be too large, or that is not valid.

    Each column counts as many columns of the design as it has levels; sums add, interactions multiply. This is an upper
    bound, because contrasts and repeated terms only remove columns.

    Parameters
    ----------
    formula : str
    widths : mapping
        Largest number of design columns of each declared column.
    """
    if len(formula) > MOST_CHARACTERS:
        raise InputError(WHERE, f"{len(formula)} characters", f"Give at most {MOST_CHARACTERS}.")
    operands: list[int] = []
    operators: list[str] = []
    previous = ""
    for token in _tokens(formula):
        if token == "(":
            operators.append(token)
        elif token == ")":
            while operators and operators[-1] != "(":
                _apply(operators.pop(), operands, formula)
            if not operators:
                raise _no_formula(formula)
            operators.pop()
        elif token in BINDING:
            if previous in ("", "(") or previous in BINDING:
                # A sign in front of a term, such as '-1'.
                operands.append(0)
            while operators and operators[-1] != "(" and BINDING[operators[-1]] >= BINDING[token]:
                _apply(operators.pop(), operands, formula)
            operators.append(token)
        else:
            power = previous in ("**", "^")
            operands.append(_power(token, formula) if power else widths.get(token.strip("`"), 1))
        previous = token
    while operators:
        if operators[-1] == "(":
            raise _no_formula(formula)
        _apply(operators.pop(), operands, formula)


def _tokens(formula: str) -> list[str]:
    found, at = [], 0
    text = formula.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None or match[1] == "(" and found and found[-1] not in BINDING and found[-1] != "(":
            raise InputError(
                WHERE,
                repr(text[max(at - 20, 0) : at + 40]),
                "Functions are not evaluated: name columns only (in backticks if they have spaces or signs), joined by + - "
                "* : / ** and parentheses, and set center, scale or log where a column is declared.",
            )
        found.append(match[1])
        at = match.end()
    return found


def _power(token: str, formula: str) -> int:
    if not (token.isascii() and token.isdigit()) or not 1 <= int(token[:4]) <= MOST_POWER:
        raise InputError(WHERE, repr(formula[:80]), f"Give powers from 1 to {MOST_POWER}.")
    return int(token)


def _apply(operator: str, operands: list[int], formula: str) -> None:
    if len(operands) < 2:
        raise _no_formula(formula)
    right, left = operands.pop(), operands.pop()
    if operator in ("**", "^"):
        size = (1 + left) ** min(right, MOST_POWER) - 1
    else:
        product = left * right if operator in ("*", "/", ":", "%in%") else 0
        size = product if operator in (":", "%in%") else left + right + product
    if size > MOST_COLUMNS:
        raise InputError(
            WHERE, f"a design of more than {MOST_COLUMNS} columns", "Use fewer interactions, levels or powers."
        )
    operands.append(size)


def _no_formula(formula: str) -> InputError:
    return InputError(WHERE, repr(formula[:80]), SUCH_AS)
