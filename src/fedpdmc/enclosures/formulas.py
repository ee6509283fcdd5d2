"""Formulas of a program, choices in them, and whether the cases of a choice meet.

A formula is a parameter, data, or an operation on formulas and numbers; equal ones are one object. What decides a choice is
a question: the sign of ``p − q``, or whether a value is a number. A formula is continuous if it has one value for all
answers where an answer changes: where p is q. That is shown by putting q in the place of p, doing all operations on single
entries again, and finding the same number or the same formula. Formulas that are equal in another way are not known to be.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from fedpdmc.enclosures.domain import Varying, is_point
from fedpdmc.enclosures.primitives import known

# Numbers that differ by less than this, relative to what was added up in them, are the same but for rounding.
SAME = 2.0**-47
# Numbers that are this close, relative to their size, may be in either order.
NEAR = 1e-9
# What decides choices: signs of differences, whether values are numbers, and truths of which nothing is known.
SIGN, GUARD = "sign", "is a number"
ASKED = (SIGN, GUARD, "reduce_and", "reduce_or")

_NUMBERS = itertools.count()


class Formula(Varying):
    """A value of a program that is not a number.

    Attributes
    ----------
    name, own, args
        The operation, what tells it from others of this name with the same arguments, and these.
    again : callable, optional
        Makes the value of new arguments, if an entry depends on the same entry of the arguments alone.
    where : str
        The line that made it.
    depends : bool
        Whether it depends on the parameters.
    finite, numeric : bool
        Whether it is finite, or at least a number, for all parameters; ``is_number``: if its arguments are.
    range : pair of numbers
        That it lies between as it is computed, ends included, if these are limits that the program sets.
    positive : bool
        Whether it is positive for all parameters, though it may be rounded to zero.
    questions : frozenset of Formula
        What decides choices in it; itself if it does. ``steps``: nothing else is in it.
    """

    dtype = np.dtype(float)

    def __init__(self, name: str, own: Any, args: tuple[Value, ...], shape, depends: bool, again, where: str):
        self.name, self.own, self.args, self.shape, self.again, self.where = name, own, args, tuple(shape), again, where
        self.number, self.depends, facts = next(_NUMBERS), depends, known(name)
        self.inner = [arg for arg in args if isinstance(arg, Formula)]
        infinite = any(is_point(arg) and not np.all(np.isfinite(arg)) for arg in args)
        self.finite = facts.total and not infinite and all(arg.finite for arg in self.inner)
        numeric, positive = all(arg.numeric for arg in self.inner), all(map(is_positive, args))
        number = (facts.number or (facts.of_positive and positive)) and (numeric or not facts.chooses)
        self.is_number = not depends or (number and not infinite)
        self.numeric = self.is_number and (numeric or not depends)
        self.range = _range(name, [range_of(arg) for arg in args])
        self.positive = facts.positive or (facts.keeps_sign and positive) or self.range[0] > 0
        self.enters = again is not None and name not in ASKED
        self.steps = name in ASKED or (self.enters and all(arg.steps for arg in self.inner))
        asked = itertools.chain(*(arg.questions for arg in self.inner if self.enters))
        self.questions: frozenset[Formula] = frozenset([self] if depends and name in ASKED else asked)


Value = Any  # an array, or a Formula


def _range(name: str, args: list[tuple[float, float]]) -> tuple[float, float]:
    """Numbers that the result of an operation is between; rounding keeps their order."""
    if name == "clamp":
        least, x, most = args
        args = [(max(x[0], least[0]), max(x[1], least[1])), most]
    if name == "sub":
        (p_low, p_high), (q_low, q_high) = args
        return p_low - q_high, p_high - q_low
    if name == "add":
        return sum(low for low, _ in args), sum(high for _, high in args)
    if name in ("max", "min", "clamp", "move"):
        pick = max if name == "max" else min
        return pick(low for low, _ in args), pick(high for _, high in args)
    return -math.inf, math.inf


def range_of(x: Value) -> tuple[float, float]:
    """Numbers that a value is between, ends included."""
    if isinstance(x, Formula):
        return max(x.range[0], 0.0) if x.positive else x.range[0], x.range[1]
    entries = np.asarray(x, float)
    return float(np.min(entries, initial=np.inf)), float(np.max(entries, initial=-np.inf))


def is_positive(x: Value) -> bool:
    """Whether a value is shown to be positive."""
    return x.positive if isinstance(x, Formula) else bool(np.all(np.asarray(x) > 0))


def depends(x: Value) -> bool:
    """Whether a value depends on the parameters."""
    return isinstance(x, Formula) and x.depends


def questions_of(x: Value) -> list[Formula]:
    """What decides the choices in a value, in the order of the program."""
    return sorted(x.questions, key=_number) if isinstance(x, Formula) else []


def _number(x: Formula) -> int:
    return x.number


def text(params: dict[str, Any]) -> str:
    """The parameters of an operation, to compare them."""
    return str(sorted(params.items(), key=lambda pair: pair[0]))


def _key(x: Value) -> Any:
    if isinstance(x, Formula):
        return x.number
    array = np.asarray(x)
    if array.size and np.all(array == array.flat[0]):
        return array.shape, array.dtype.kind, repr(array.flat[0].item())
    return array.shape, array.dtype.kind, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def reach(x: Value, enter: Callable[[Formula], bool]) -> set[Formula]:
    """The formula and those in the arguments of formulas that are to be entered."""
    found: set[Formula] = set()
    left = [x] if isinstance(x, Formula) else []
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += one.inner if enter(one) else []
    return found


def seen(x: Value) -> set[Formula]:
    """The formulas whose derivatives the gradient has wherever they are evaluated."""
    return reach(x, lambda one: not known(one.name).chooses)


def _uncertain(guard: Formula) -> set[Formula]:
    """What a question whether values are numbers is about; in a comparison they may be infinite."""
    inside = set[Formula]().union(*map(seen, guard.args))
    return {one for one in inside if not (one.finite if guard.own is None else one.is_number)}


def _with_size(x: Value) -> tuple[Value, Any]:
    return x, np.abs(np.asarray(x, float)) if is_point(x) else None


def _size(name: str, value: np.ndarray, args: tuple[Any, ...], sizes: tuple[Any, ...]) -> Any:
    """What was added up in a number, to which its rounding is relative."""
    with np.errstate(all="ignore"):
        if name in ("add", "sub", "neg"):
            return sum(sizes)
        if name in ("mul", "div"):
            return sizes[0] * (sizes[1] if name == "mul" else 1 / np.abs(args[1]))
        return np.abs(np.asarray(value, float))


def _is_same(x: Any, y: Any, x_size: Any, y_size: Any) -> bool:
    """Whether values are the same, but for the rounding of numbers of these sizes and of those that are added to others."""
    if is_point(x) and is_point(y):
        with np.errstate(invalid="ignore"):
            rounding = SAME * np.nan_to_num(np.maximum(x_size, y_size), posinf=0.0)
            return bool(np.all((np.abs(1.0 * x - 1.0 * y) <= rounding) | (x == y)))
    if is_point(x) or is_point(y) or not x.name == y.name == "add":
        return x is y
    pairs = [(_with_size(one), _with_size(other)) for one, other in zip(x.args, y.args, strict=True)]
    return all(_is_same(one, other, one_size, other_size) for (one, one_size), (other, other_size) in pairs)


class Formulas:
    """Makes formulas; those that are the same are made once.

    Attributes
    ----------
    rules : dict
        Operations on single entries that are more than their names.
    where : str
        The line of the user's function that is being read.
    trusted : bool
        Whether it belongs to a function that is known to be continuous.
    proves : bool
        Whether formulas are compared, and not read: zero times any value is then zero. Where that value has a pole, the
        rates have no bound, because an enclosure that contains the place of a choice is made of all its cases.
    """

    rules: dict[str, Callable[..., Value]]

    def __init__(self):
        self._made: dict[Any, Formula] = {}
        self.where, self.trusted, self.proves = "", False, False

    def make(self, name: str, own: Any, args: Iterable[Value], shape, again: Callable | None = None) -> Formula:
        """A value with this name of these arguments."""
        args = tuple(args)
        identity = (name, own, tuple(map(_key, args)), tuple(shape))
        if identity not in self._made:
            self._made[identity] = Formula(name, own, args, shape, any(map(depends, args)), again, self.where)
        return self._made[identity]

    def fresh(self, name: str, shape, depends: bool = True) -> Formula:
        """A value of which nothing is known."""
        return Formula(name, None, (), shape, depends, None, self.where)

    def entrywise(self, name: str, params: dict[str, Any], compute: Callable, *args: Value) -> Value:
        """An operation on the entries of arrays."""
        shape = np.broadcast_shapes(*map(np.shape, args))
        values = [self.widen(arg, shape) for arg in args]
        if all(map(is_point, values)):
            with np.errstate(all="ignore"), jax.ensure_compile_time_eval():
                return np.asarray(compute(*values))
        rule = self.rules.get(name)
        return self.function(name, params, compute, *values) if rule is None else rule(self, params, compute, *values)

    def function(self, name: str, params: dict[str, Any], compute: Callable, *args: Value) -> Formula:
        """An operation that is known by its name alone."""

        def again(*new: Value) -> Value:
            return self.entrywise(name, params, compute, *new)

        return self.make(name, text(params), args, args[0].shape, again)

    # Choices ---------------------------------------------------------------------------------------------------------

    def sign(self, p: Value, q: Value, sides: tuple[int, ...], name: str = SIGN) -> Value:
        """The sign of ``p − q``, −1, 0 or 1, of which only some ``sides`` matter."""
        if is_point(p) and is_point(q):
            return np.sign(p - q)
        if isinstance(p, Formula) and p.name in ("sub", "neg") and is_point(q) and not np.any(q):
            p, q = p.args if p.name == "sub" else (q, *p.args)
        if is_point(p) or (isinstance(q, Formula) and q.number < p.number):
            # A difference and its negative have one sign.
            turned = self.sign(q, p, tuple(-side for side in sides), name)
            return self.entrywise("neg", {}, np.negative, turned)

        def again(p: Value, q: Value) -> Value:
            return self.sign(p, q, sides, name)

        return self.make(name, sides, (p, q), p.shape, again)

    def guard(self, answer: Value, otherwise: Value, *values: Value, sign: Value = None) -> Value:
        """``answer`` where values are numbers, ``otherwise`` elsewhere; ``sign`` is that of a comparison of two."""
        if self.trusted:
            return answer
        own = None if sign is None else tuple(question.number for question in questions_of(sign))

        def again(*new: Value) -> Value:
            if all(map(is_point, new)):
                return np.logical_and.reduce(list(map(np.isfinite, new)))
            found = self.make(GUARD, own, new, new[0].shape, again)
            return found if _uncertain(found) else np.ones(found.shape, bool)

        return self.entrywise("select_n", {}, pick, again(*values), otherwise, answer)

    def assume_numbers(self, x: Value) -> Value:
        """A choice that takes for numbers the values that its case for numbers contains.

        The gradient then contains their derivatives, which have no bound at the edge, and a run stops there. For a
        comparison any of the cases may contain them: where values are not finite it is undecided, and all cases count.
        """
        for question in questions_of(x):
            if question.name != GUARD:
                continue
            numbers, others = (self.restrict(x, question, answer) for answer in (True, False))
            cases = [numbers]
            if question.own is not None:
                signs = (one for one in questions_of(numbers) if one.number in question.own)
                cases += [others, *(self.restrict(numbers, one, side) for one in signs for side in one.own)]
            if _key(numbers) == _key(others) or _uncertain(question) <= set[Formula]().union(*map(seen, cases)):
                x = numbers
        return x

    def restrict(self, x: Value, question: Formula, answer: Any) -> Value:
        """A value reduced to one answer to a question; other questions stay as they are."""
        by = {question: np.full(question.shape, answer if question.name != SIGN else float(answer))}
        return self._replace(x, by, lambda one: one.enters)[0]

    def jump_of(self, x: Value) -> Formula | None:
        """A question at which a value is not shown to be continuous; None if it is.

        All answers must give the same value where the answer changes, whatever the answers to other questions that may
        change there too. A place that is a null set does not matter.
        """
        for question in questions_of(x):
            answers = question.own if question.name == SIGN else (True, False)
            cases = [self.restrict(x, question, answer) for answer in answers]
            for one, other in itertools.pairwise(cases):
                meet = _key(one) == _key(other)
                if question.name == SIGN and not meet:
                    meet = self._meet(question.args[0], question.args[1], one, other, {})
                if not meet:
                    return question
        return None

    def _meet(self, p: Formula, q: Value, one: Value, other: Value, by: dict[Formula, Value]) -> bool:
        """Whether two values are equal where p is q, by putting one in the place of the other."""
        for there in ({**by, p: q}, {**by, q: p} if isinstance(q, Formula) else by):
            if self._are_equal(one, other, there):
                return True
        root: Any = q
        if p.name == "square" and is_point(q):
            root = np.sqrt(np.where(root < 0, np.nan, root))
        elif p.name not in ("neg", "abs"):
            return False
        less = self.entrywise("neg", {}, np.negative, root)
        ends = [less] if p.name == "neg" else [root, less]
        return all(self._meet(p.inner[0], end, one, other, {**by, p: q}) for end in ends)

    def _are_equal(self, one: Value, other: Value, by: dict[Formula, Value]) -> bool:
        """Whether values are the same where formulas have these values.

        Equal infinities are equal: a path never crosses a surface if the potential rises to infinity on one side of it and
        is infinite on the other. NaN is equal to nothing.
        """
        found: list[tuple[Any, Any]] = [self._replace(value, by, lambda one: True) for value in (one, other)]
        (x, x_size), (y, y_size) = found
        return _is_same(x, y, x_size, y_size)

    def _replace(self, x: Value, by: dict[Formula, Value], enter: Callable[[Formula], bool]) -> tuple[Value, Any]:
        """A value with formulas replaced, within operations on single entries too, and what was added up in a number."""
        before, self.proves = self.proves, True
        try:
            return self._remake(x, by.get, enter)
        finally:
            self.proves = before

    def _remake(self, x: Value, put: Callable, enter: Callable, index: Any = None) -> tuple[Value, Any]:
        """A value made again of other formulas, or of the entries at some places."""
        made: dict[Formula, tuple[Value, Any]] = {}

        def remade(value: Value) -> tuple[Value, Any]:
            if isinstance(value, Formula):
                return made[value]
            return _with_size(value if index is None else np.reshape(value, -1)[index])

        def enters(one: Formula) -> bool:
            return one.again is not None and enter(one) and put(one) is None

        before = self.where
        for one in sorted(reach(x, enters), key=_number):
            if not enters(one):
                new = put(one)
                made[one] = _with_size(one if new is None else new)
                continue
            args, sizes = zip(*map(remade, one.args), strict=True)
            same = all(new is old for new, old in zip(args, one.args, strict=True))
            if same or (one.name == SIGN and _are_near(*args)):
                # What may have either sign is a question still.
                made[one] = one, None
                continue
            self.where = one.where
            assert one.again is not None
            new = one.again(*args)
            made[one] = (new, _size(one.name, new, args, sizes)) if all(map(is_point, args)) else _with_size(new)
        self.where = before
        return remade(x)

    # Moves -----------------------------------------------------------------------------------------------------------

    def widen(self, x: Value, shape) -> Value:
        """Broadcast as arithmetic does it."""
        if tuple(np.shape(x)) == tuple(shape):
            return np.asarray(x) if is_point(x) else x
        return self.fields(lambda part: np.broadcast_to(part, shape), x)

    def fields(self, move: Callable, x: Value) -> Value:
        """A value with its entries moved, by a function that moves those of arrays."""
        with jax.ensure_compile_time_eval():
            if is_point(x):
                return np.asarray(move(x))
            return self.move_entries(np.asarray(move(np.arange(math.prod(x.shape)).reshape(x.shape))), x)

    def move_entries(self, index: np.ndarray, x: Value) -> Value:
        """The entries of a value at these places of its flattened array."""
        if is_point(x):
            return np.reshape(x, -1)[index]
        if _is_in_place(index, x.shape):
            return x

        def move(one: Formula) -> Value:
            return None if one.again is not None else self._moved(index, one)

        return self._remake(x, move, lambda one: True, index)[0]

    def _moved(self, index: np.ndarray, x: Formula) -> Formula:
        """Moves are combined; a question stays one."""
        if x.name == "move":
            shape, places = x.own
            index, x = np.frombuffer(places, np.int64).reshape(shape).reshape(-1)[index], x.args[0]
            if _is_in_place(index, x.shape):
                return x
        name = x.name if x.name in ASKED else "move"
        return self.make(name, (index.shape, index.astype(np.int64).tobytes()), (x,), index.shape)


def _is_in_place(index: np.ndarray, shape: tuple[int, ...]) -> bool:
    return np.array_equal(index, np.arange(math.prod(shape)).reshape(shape))


def _are_near(p: Value, q: Value) -> bool:
    """Whether numbers may be in either order."""
    if not (is_point(p) and is_point(q)):
        return False
    with np.errstate(invalid="ignore"):
        return bool(np.any((np.abs(p - q) <= NEAR * np.maximum(np.abs(p), np.abs(q))) | (p == q)))


def pick(which: Any, *cases: Any) -> np.ndarray:
    """The case that a truth or a number selects, entry by entry."""
    which, found = np.asarray(which).astype(int), cases[-1]
    for i in range(len(cases) - 2, -1, -1):
        found = np.where(which == i, cases[i], found)
    return found
