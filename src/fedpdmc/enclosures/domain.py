"""The interface of an abstract domain: the kind of enclosures that a program is evaluated on, and where.

A `Domain` is a set of points of the input (a cell of time, an interval of path). Values of the program
on that set are *forms*: arrays where nothing varies ("points"), else an `Enclosure`. Each domain has a table of rules, one
for each primitive, from forms to forms: if the arguments are in their enclosures, the result is in its own.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import equinox as eqx
import numpy as np

# rule(domain, params, *forms) -> form, or a tuple of them for primitives with several results
Rule = Callable[..., Any]
Form = Any  # an array, or an Enclosure
# Rules that are the same in every domain; a rule of the domain itself comes first.
SHARED: dict[str, Rule] = {}


class Varying:
    """A value that varies over the domain."""


class Enclosure(Varying, eqx.Module):
    """What is known of a value that varies over the domain. It has a ``shape`` and, unless it is a `Truth`, a ``dtype``."""


def is_point(x: Form) -> bool:
    """Whether nothing varies."""
    return not isinstance(x, Varying)


def is_static(x: Form) -> bool:
    """Whether its value is known while tracing."""
    return isinstance(x, (bool, int, float, np.generic, np.ndarray))


def is_zero(x: Form) -> bool:
    """Whether it is known while tracing to be zero."""
    return is_static(x) and not np.any(x)


def shape_of(x: Form) -> tuple[int, ...]:
    """The shape of the value."""
    return np.shape(x) if is_point(x) else x.shape


class Truth(Enclosure):
    """A comparison: its ``value`` where ``known``, undecided elsewhere. Arrays as the domain has them."""

    value: Any
    known: Any

    @property
    def shape(self):
        """Shape of the arrays."""
        return np.shape(self.value)


class Assumed(Enclosure):
    """A comparison that is ``value`` if ``witness`` is finite: a guard against infinities and NaN.

    Where the comparison decides a choice, the result becomes NaN if the witness is not finite, and no bound is made of it.
    A finite witness does not change the result.
    """

    value: bool = eqx.field(static=True)
    witness: Any

    @property
    def shape(self):
        """Shape of the value."""
        return self.witness.shape


class Rules(Protocol):
    """What applies rules of primitives to forms."""

    def rule(self, name: str, params: dict[str, Any], /, *forms: Form) -> Any:
        """The result of a primitive."""
        ...

    def fields(self, function: Callable, x: Form, /) -> Form:
        """The form with its entries moved."""
        ...


class Domain(eqx.Module):
    """A set of inputs on which a program is evaluated, and the kind of enclosures.

    Class attributes
    ----------------
    rules : dict
        The domain's own rules by the name of the primitive.
    title : str
        What errors call it.
    """

    rules: ClassVar[dict[str, Rule]]
    title: ClassVar[str]

    @classmethod
    def enter(cls, *names: str) -> Callable[[Rule], Rule]:
        """Enter a rule under these names of primitives."""

        def entered(function: Rule) -> Rule:
            cls.rules.update(dict.fromkeys(names, function))
            return function

        return entered

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether there is a rule for a primitive."""
        return name in cls.rules or name in SHARED

    def rule(self, name: str, params: dict[str, Any], *forms: Form) -> Any:
        """The result of a primitive by its rule.

        Raises
        ------
        NotImplementedError
            If there is none, or none for these arguments.
        """
        found = self.rules.get(name) or SHARED.get(name)
        if found is None:
            raise NotImplementedError(f"no rule for {name!r} {self.title}")
        return found(self, params, *forms)

    @abc.abstractmethod
    def fields(self, function: Callable, *forms: Form) -> Form:
        """A structural operation (it moves entries and may set them to zero) on every part of the forms."""

    @abc.abstractmethod
    def spans(self, *forms: Form) -> list[Any]:
        """The ranges of values, as `Interval` that can be compared with each other."""

    @abc.abstractmethod
    def truths(self, *forms: Form) -> list[Truth]:
        """Points, assumptions and truths as truths that can be combined with each other."""

    @abc.abstractmethod
    def choose(self, which: Truth, no: Form, yes: Form, either: Any = None) -> Form:
        """``yes`` where true, ``no`` where false, and where undecided all values of both (or those in ``either``)."""

    @abc.abstractmethod
    def poisoned(self, x: Form, witness: Form) -> Form:
        """The form itself, NaN where the witness is not finite."""

    @abc.abstractmethod
    def filled(self, x: Form, where: Any, fill: float) -> Form:
        """A number at the entries where ``where``."""

    @abc.abstractmethod
    def full(self, x: Form, like: Form) -> Form:
        """An enclosure with every part an array of the shape that ``like`` needs, as a loop carries it."""

    def still(self, function: Callable, x: Form) -> list[Form]:
        """A function of the middles of forms, which returns pairs (value, error), as constant enclosures."""
        raise NotImplementedError(f"the middle of a value {self.title}")

    def wider(self, function: Callable, x: Form) -> Form:
        """The form with an additional error: a function of the bound of its absolute values."""
        raise NotImplementedError(f"a wider value {self.title}")

    def stopped(self, x: Form, among: Form | None, axes: tuple[int, ...]) -> tuple[Form, Form] | None:
        """A value under ``stop_gradient``, split into a smooth part and a shift that may cancel; None leaves it whole.

        ``among`` are the values whose maximum over ``axes`` it is, where that is so.
        """
        return None

    def extreme(self, x: Form) -> tuple[Form, Form] | None:
        """The largest or smallest of values, split in the same way."""
        return None


def shared(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for all domains."""

    def entered(function: Rule) -> Rule:
        SHARED.update(dict.fromkeys(names, function))
        return function

    return entered
