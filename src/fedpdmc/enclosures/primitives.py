"""What is known of the primitives of JAX. What they do to enclosures are the rules of domains."""

from __future__ import annotations

from typing import Any, NamedTuple

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
        A continuous function of one entry of each operand.
    total : bool
        Finite wherever its operands are, and for these: no comparison with infinity tells them apart. Polynomials are.
    number : bool
        A number for all operands, though perhaps an infinite one. What is total is.
    of_positive : bool
        A number where the operand is positive.
    positive : bool
        Its values are positive. ``keeps_sign``: if those of its operands are.
    chooses : bool
        Its derivative leaves out what it does not choose.
    jumps, continuous : bool
        It is discontinuous; or continuous, though it has no rule on intervals.
    """

    moves: int = 0
    one_array: bool = False
    folded: bool = False
    entrywise: bool = False
    total: bool = False
    number: bool = False
    of_positive: bool = False
    positive: bool = False
    keeps_sign: bool = False
    chooses: bool = False
    jumps: bool = False
    continuous: bool = False


PRIMITIVES: dict[str, Primitive] = {}
NOTHING = Primitive()


def known(name: str) -> Primitive:
    """What is known of a primitive."""
    return PRIMITIVES.get(name, NOTHING)


def _enter(names: str, **facts: Any) -> None:
    facts["number"] = facts.get("number", False) or facts.get("total", False)
    PRIMITIVES.update(dict.fromkeys(names.split(), Primitive(**facts)))


_enter("broadcast_in_dim reshape squeeze", moves=1, one_array=True, folded=True)
_enter("transpose rev slice split unstack tile copy copy_p", moves=1, one_array=True)
_enter("gather dynamic_slice", moves=1, one_array=True, total=True)
_enter("expand_dims", one_array=True)
_enter("concatenate stack", moves=-1, total=True, keeps_sign=True)
_enter("pad", moves=2, total=True, keeps_sign=True)
_enter("dynamic_update_slice", moves=2, total=True)
_enter("optimization_barrier", moves=-1)
_enter(f"{PARAMETERS} data scatter scatter-add dot_general", total=True)
_enter("move reduce_sum reduce_prod cumsum cumprod", total=True, keeps_sign=True)
_enter("conv_general_dilated", total=True, continuous=True)
_enter("mul", entrywise=True, total=True, keeps_sign=True, folded=True)
_enter("add", entrywise=True, total=True, keeps_sign=True, folded=True)
_enter("neg sub", entrywise=True, total=True, folded=True)
_enter("not xor", entrywise=True, total=True)
_enter("div", entrywise=True, number=True, keeps_sign=True)
_enter("square one_minus_square", entrywise=True, total=True)
_enter("exp exp2 cosh", entrywise=True, number=True, positive=True)
_enter("logistic erfc", entrywise=True, total=True, positive=True)
_enter("sin cos tanh erf abs atan asinh cbrt", entrywise=True, total=True)
_enter("expm1 sinh lgamma digamma", entrywise=True, number=True)
_enter("sqrt rsqrt", entrywise=True, of_positive=True, keeps_sign=True)
_enter("log log1p", entrywise=True, of_positive=True)
_enter("tan asin acos acosh atanh erf_inv polygamma igamma igammac", entrywise=True)
_enter("bessel_i0e bessel_i1e regularized_incomplete_beta", entrywise=True)
_enter(f"integer_pow logaddexp ndtr log_ndtr cumlogsumexp {STOPPED}", number=True)
_enter("max min clamp reduce_max reduce_min cummax cummin select_n", total=True, chooses=True)
_enter("sort", total=True, chooses=True, continuous=True)
_enter("choice", number=True, chooses=True)
_enter("convert_element_type", total=True, folded=True)
_enter("floor ceil round rem atan2 nextafter argmax argmin reduce_precision clz population_count", jumps=True)
_enter("shift_left shift_right_logical shift_right_arithmetic", jumps=True)
_enter("cholesky triangular_solve custom_linear_solve", continuous=True)
