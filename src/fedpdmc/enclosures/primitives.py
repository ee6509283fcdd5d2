"""What is known of the primitives of JAX. What they do to enclosures are the rules of domains."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

ANY, HALF = (-math.inf, math.inf), (0.0, math.inf)
# In formulas, the names of values that are not differentiated, and of parameters.
STOPPED, PARAMETERS = "stop_gradient", "parameters"


class Primitive(NamedTuple):
    """One primitive, or another name that a formula may have; the default for those of which nothing is known.

    Attributes
    ----------
    moves : int
        It only moves entries: how many leading operands are data, the others being indices; −1 for all.
    one_array : bool
        It moves the entries of its first operand.
    folded : bool
        Computed while tracing if all operands are constants of the program, so that zeros are known to be zeros.
    entrywise : bool
        A smooth function of one entry of each operand.
    polynomial : bool
        A polynomial of the entries of its operands.
    total : bool
        Finite wherever its operands are, and for these: no comparison with infinity tells them apart. Polynomials are.
    number : bool
        A number for all operands, though perhaps an infinite one. What is total is.
    of_positive : bool
        A number where the operand is positive.
    range : (float, float)
        Where its values are, ends included; ``positive`` if they are not zero either.
    hull : bool
        Its values are in the hull of those of its operands.
    keeps_sign : bool
        Not negative where the operands are not.
    chooses : bool
        Its derivative leaves out what it does not choose.
    jumps, continuous : bool
        It is discontinuous; or continuous, though it has no rule on intervals.
    of_truths : bool
        It takes whole numbers and truths of data as they are, and its result may jump though the operands do not.
    steps : bool
        Its result may jump though the operands do not.
    """

    moves: int = 0
    one_array: bool = False
    folded: bool = False
    entrywise: bool = False
    polynomial: bool = False
    total: bool = False
    number: bool = False
    of_positive: bool = False
    range: tuple[float, float] = ANY
    positive: bool = False
    hull: bool = False
    keeps_sign: bool = False
    chooses: bool = False
    jumps: bool = False
    continuous: bool = False
    of_truths: bool = False
    steps: bool = False


PRIMITIVES: dict[str, Primitive] = {}


def known(name: str) -> Primitive:
    """What is known of a primitive."""
    return PRIMITIVES.get(name, NOTHING)


NOTHING = Primitive()


def _enter(names: str, **facts: Any) -> None:
    facts["total"] = facts.get("total", False) or facts.get("polynomial", False)
    facts["number"] = facts.get("number", False) or facts["total"]
    facts["steps"] = facts.get("steps", False) or facts.get("of_truths", False)
    PRIMITIVES.update(dict.fromkeys(names.split(), Primitive(**facts)))


_enter("broadcast_in_dim reshape squeeze", moves=1, one_array=True, folded=True)
_enter("transpose rev slice split unstack tile copy copy_p", moves=1, one_array=True)
_enter("gather dynamic_slice", moves=1, one_array=True, polynomial=True)
_enter("expand_dims", one_array=True)
_enter("concatenate stack", moves=-1, polynomial=True, hull=True)
_enter("pad", moves=2, polynomial=True, hull=True)
_enter("dynamic_update_slice", moves=2, polynomial=True)
_enter("optimization_barrier", moves=-1)
_enter(f"{PARAMETERS} data scatter scatter-add dot_general", polynomial=True)
_enter("move", polynomial=True, hull=True)
_enter("conv_general_dilated", polynomial=True, continuous=True)
_enter("mul", polynomial=True, keeps_sign=True, folded=True)
_enter("reduce_sum reduce_prod cumsum cumprod", polynomial=True, keeps_sign=True)
_enter("add neg sub", folded=True)
_enter("exp exp2 cosh", entrywise=True, number=True, positive=True, range=HALF)
_enter("logistic", entrywise=True, total=True, positive=True, range=(0.0, 1.0))
_enter("erfc", entrywise=True, total=True, positive=True, range=(0.0, 2.0))
_enter("sin cos tanh erf", entrywise=True, total=True, range=(-1.0, 1.0))
_enter("abs", entrywise=True, total=True, range=HALF)
_enter("atan asinh cbrt", entrywise=True, total=True, keeps_sign=True)
_enter("expm1 sinh", entrywise=True, number=True, keeps_sign=True)
_enter("lgamma digamma", entrywise=True, number=True)
_enter("log", entrywise=True, of_positive=True)
_enter("log1p", entrywise=True, of_positive=True, keeps_sign=True)
_enter("sqrt rsqrt", entrywise=True, of_positive=True, range=HALF)
_enter("tan asin acos acosh atanh erf_inv polygamma igamma igammac bessel_i0e bessel_i1e", entrywise=True)
_enter("regularized_incomplete_beta", entrywise=True)
_enter("pow", of_positive=True)
_enter("reciprocal", number=True, keeps_sign=True)
_enter(f"integer_pow logaddexp ndtr log_ndtr cumlogsumexp {STOPPED}", number=True)
_enter("max min clamp", total=True, chooses=True)
_enter("reduce_max reduce_min cummax cummin", total=True, chooses=True, hull=True)
_enter("sort", total=True, chooses=True, hull=True, continuous=True)
_enter("choice", number=True, chooses=True, hull=True)
_enter("convert_element_type", total=True, of_truths=True, folded=True)
_enter("select_n and or xor not gt ge lt le eq ne", of_truths=True)
_enter("sign is_finite", steps=True)
_enter("floor ceil round rem atan2 nextafter argmax argmin reduce_precision clz population_count", jumps=True)
_enter("shift_left shift_right_logical shift_right_arithmetic", jumps=True)
_enter("cholesky triangular_solve custom_linear_solve", continuous=True)
