"""Which functions of JAX a program calls, and the formulas that are enclosed as one function.

What is known of functions of JAX must not be taken for known of a user's. Names say little: a user's function may have any,
and `functools.wraps` gives it the name, the file and the line of another one. So a function is one of JAX only if the frames
in which its equations were made are; one that has rules as a whole only if its equations are those of the function itself;
and a derivative only if all functions that its rule can call are.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.scipy import special

from fedpdmc._jax.programs import INNER, called, equations, evaluate

# Where an equation comes from ------------------------------------------------------------------------------------------


def line_of(equation) -> str:
    """The line of the user's function that an equation comes from."""
    from jax._src import source_info_util

    return source_info_util.summarize(equation.source_info)


# Functions of JAX that are smooth although their formulas have branches.
BRANCHED = {"betaln", "algdiv", "log_ndtr", "_ndtr", "ndtr", "_ndtri", "ndtri", "logaddexp", "sinc",
            "xlogy", "xlog1py"}  # fmt: skip
# Null sets for which NumPyro checks membership: values are in them by construction, up to rounding.
THIN = {f"{name}.__call__" for name in ("_Simplex", "_CorrCholesky", "_CorrMatrix", "_PositiveDefinite",
                                        "_PositiveSemiDefinite", "_Sphere", "_ZeroSum")}  # fmt: skip
CONSTRAINTS = "/numpyro/distributions/constraints.py"
# With the separator: other packages have names that begin alike.
_FOLDERS = tuple(folder.rstrip("/\\") + separator for folder in jax.__path__ for separator in "/\\")


def is_of_jax(place: str) -> bool:
    """Whether a file, or a line of one, belongs to JAX."""
    return place.startswith(_FOLDERS)


def place_of(debug_info: Any) -> tuple[str, str]:
    """Name and line of a function as JAX reports them, which may be those of a function that it wraps."""
    name, _, place = str(debug_info.func_src_info).partition(" at ")
    return name, place


def within_known(equation) -> bool:
    """Whether an equation belongs to a function that is known to be continuous, whatever its formula."""
    for frame in _frames(equation):
        if frame.function_name in THIN and frame.file_name.replace("\\", "/").endswith(CONSTRAINTS):
            return True
        if not is_of_jax(frame.file_name):
            return False
        if frame.function_name in BRANCHED:
            return True
    return False


def _frames(equation) -> tuple[Any, ...]:
    trace = equation.source_info.traceback
    return () if trace is None else tuple(trace.frames)


def name_of_call(equation) -> str:
    """The name of the function of JAX that was called; empty for a user's function, even one of the same name.

    A function of `WHOLE` has rules as a whole: only its own text is it, since others may be composed of functions of JAX.
    """
    jaxpr = called(equation)[0]
    name, place = place_of(jaxpr.debug_info)
    if not is_of_jax(place):
        return ""
    return name if (_is_text_of(jaxpr, name) if name in WHOLE else _made_by(jaxpr, name)) else ""


def _made_by(jaxpr, name: str) -> bool:
    """Whether all equations of a program were made by a function of JAX of this name, with none of a user's between."""

    def own(equation) -> bool:
        for frame in _frames(equation):
            if not is_of_jax(frame.file_name):
                break
            if frame.function_name.rpartition(".")[2] == name:
                return True
        # A function that is compiled calls itself under its name.
        return equation.primitive.name in INNER and _made_by(called(equation)[0], name)

    return bool(jaxpr.eqns) and all(map(own, jaxpr.eqns))


# Functions that have rules as a whole. They may be called without a frame of their name.
WHOLE = {
    "log_ndtr": special.log_ndtr, "ndtr": special.ndtr, "logaddexp": jnp.logaddexp, "xlogy": special.xlogy,
    "xlog1py": special.xlog1py, "betaln": special.betaln,
}  # fmt: skip
ONE_ARGUMENT = {"log_ndtr", "ndtr"}


def _is_text_of(jaxpr, name: str) -> bool:
    """Whether a program is, equation by equation, that of the function of JAX of this name, mapped over axes or not.

    A text has all numbers but those of constant arrays: a program with these is none of them.
    """
    kinds = tuple((x.aval.shape, str(x.aval.dtype)) for x in jaxpr.invars if hasattr(x.aval, "dtype"))
    if len(kinds) != len(jaxpr.invars) or len(kinds) != (1 if name in ONE_ARGUMENT else 2) or _has_constants(jaxpr):
        return False
    return _text(jaxpr) in _texts_of(name, kinds)


def _text(jaxpr) -> str:
    """The text of a program without equations that nothing uses, which some transformations leave out."""
    used, kept = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if any(id(x) in used for x in equation.outvars):
            kept.append(equation)
            used |= set(map(id, equation.invars))
    return str(jaxpr.replace(eqns=kept[::-1]))


def _has_constants(jaxpr) -> bool:
    calls = (equation for equation in equations(jaxpr) if equation.primitive.name in INNER)
    return bool(jaxpr.constvars) or any(called(equation)[0].constvars for equation in calls)


@functools.lru_cache(maxsize=256)
def _texts_of(name: str, kinds: tuple[tuple[tuple[int, ...], str], ...]) -> set[str]:
    """The texts of a function of JAX for arguments of these shapes and types."""
    function, found = WHOLE[name], set()
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    # Mapped over the axes that all arguments have.
    shapes = [shape for shape, _ in kinds]
    alike = next(
        (k for k, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1), min(map(len, shapes))
    )
    for _ in range(1 + alike):
        whole = jax.make_jaxpr(function)(*arguments).jaxpr
        found.add(_text(whole))
        calls = [called(equation)[0] for equation in equations(whole) if equation.primitive.name in INNER]
        found |= {_text(inner) for inner in calls if place_of(inner.debug_info)[0] == name}
        function = jax.vmap(function)
    return found


# Functions of JAX whose derivative is that of the user, or of a solution which the user's own solver finds.
BY_USER = {"_custom_root", "wrapped_fun"}
RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")


def is_by_hand(equation) -> bool:
    """Whether the derivative that a call has been given may be a user's."""
    jaxpr = called(equation)[0]
    name, place = place_of(jaxpr.debug_info)
    of_jax = is_of_jax(place) and (_made_by(jaxpr, name) or name in WHOLE and _is_text_of(jaxpr, name))
    if not of_jax or name in BY_USER:
        return True
    rules = [rule for key in RULES if (rule := equation.params.get(key))]
    return not rules or not all(is_of_jax(code.co_filename) for rule in rules for code in _codes(rule))


def derivatives_by_hand(jaxpr) -> tuple[bool, ...]:
    """For each call with a derivative of its own, at any depth, whether that may be a user's: its text does not say."""
    calls = (x for x in equations(jaxpr) if x.primitive.name.startswith("custom_") and x.primitive.name in INNER)
    return tuple(map(is_by_hand, calls))


# Where objects of JAX keep the functions that they call.
_KEPT = ("fun", "jvp", "fwd", "bwd", "f", "f_transformed", "__wrapped__", "__self__", "__func__")


def _codes(rule: Any) -> Iterator[types.CodeType]:
    """The code of all functions that a rule holds: in closures, arguments and objects."""
    seen: dict[int, Any] = {}
    left = [rule]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, types.FunctionType):
            yield one.__code__
            left += [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
            left += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        elif isinstance(one, functools.partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, (tuple, list)):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif callable(one) and not isinstance(one, type):
            left += [getattr(one, name) for name in _KEPT if hasattr(one, name)]
            left += [vars(kind)["__call__"] for kind in type(one).__mro__ if "__call__" in vars(kind)]
        elif type(one).__name__ == "WrappedFun":
            left += [one.f, one.f_transformed]


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


# Formulas that are one function ----------------------------------------------------------------------------------------


# The name of functions that users vouch for (`fedpdmc.enclosures.continuity`).
VOUCHED = "vouched_to_be_continuous"
# Functions of JAX that have a rule as a whole.
CALLS = {"log_ndtr", "logaddexp", "ndtr"}


def sigmoid_of(producers: dict[Any, Any], equation) -> tuple[Any, Any] | None:
    """Atoms (x, y) if the equation is ``exp(x − logaddexp(x, y))``, the derivative of logaddexp: ``logistic(x − y)``."""
    difference = producers.get(_key(equation.invars[0])) if equation.primitive.name == "exp" else None
    if difference is None or difference.primitive.name != "sub":
        return None
    own, total = (_unguarded(producers, atom) for atom in difference.invars)
    call = producers.get(_key(total))
    if call is None or call.primitive.name != "custom_jvp_call" or name_of_call(call) != "logaddexp":
        return None
    x, y = call.invars
    if _same(own, x):
        return x, y
    return (y, x) if _same(own, y) else None


def order_of(producers: dict[Any, Any], equation) -> tuple[str, Any, Any] | None:
    """A comparison and its atoms if the equation is ``x == max(x, y)``, which is ``x >= y``, or ``x == min(x, y)``.

    The derivatives of `max`, `min` and `clip` contain it. Enclosures of x and of the maximum overlap unless they are points,
    so the equality itself could never be decided.
    """
    if equation.primitive.name != "eq":
        return None
    for own, extreme in (equation.invars, equation.invars[::-1]):
        made = producers.get(_key(extreme))
        if made is None or made.primitive.name not in ("max", "min"):
            continue
        for x, y in (made.invars, made.invars[::-1]):
            if _same(own, x):
                return "ge" if made.primitive.name == "max" else "le", x, y
    return None


def largest_of(producers: dict[Any, Any], atom: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Atom and axes if this is the maximum of an array over some axes, apart from guards and reshapes."""
    made = producers.get(_key(atom))
    if made is None:
        return None
    if made.primitive.name == "reduce_max":
        return made.invars[0], made.params["axes"]
    if made.primitive.name not in ("max", "select_n", "broadcast_in_dim", "reshape", "squeeze", "copy"):
        return None
    return next((found for other in made.invars if (found := largest_of(producers, other)) is not None), None)


def _unguarded(producers: dict[Any, Any], atom: Any) -> Any:
    """The atom behind ``where(atom == inf, 0, atom)``."""
    choice = producers.get(_key(atom))
    if choice is None or choice.primitive.name != "select_n" or len(choice.invars) != 3:
        return atom
    which, no, _ = choice.invars
    test = producers.get(_key(which))
    if test is None or test.primitive.name != "eq" or not _same(test.invars[0], no):
        return atom
    bound = test.invars[1]
    return no if isinstance(bound, core.Literal) and np.isinf(bound.val) else atom


def _key(atom: Any) -> Any:
    return None if isinstance(atom, core.Literal) else atom


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, core.Literal) and isinstance(other, core.Literal):
        return bool(np.all(one.val == other.val))
    return one is other


# Stable formulas with kinks --------------------------------------------------------------------------------------------


class _Node:
    """A value of a program with the operation that made it."""

    def __init__(self, value: Any, name: str = "", inputs: tuple[_Node, ...] = (), equation: Any = None):
        self.value, self.name, self.inputs, self.equation = value, name, inputs, equation


def smoothed(function: Callable) -> Callable:
    """The same function with formulas of the softplus, ``2 Φ`` and ``log B`` written as the smooth functions that they are.

    The terms of ``max(x, 0) + log1p(exp(−|x|))`` have kinks that cancel. The intermediate values of ``log(1 + c exp(x)^n)``
    overflow where the result is nearly linear. For the normal distribution function and the beta function JAX chooses
    among formulas, and the derivative of each formula alone jumps at the choice. Indices that promise to be in range are
    clamped (`fedpdmc.enclosures.known_functions`).
    """

    def rewritten(*args):
        leaves, structure = jax.tree.flatten(args)
        closed, shape = jax.make_jaxpr(
            lambda *values: function(*jax.tree.unflatten(structure, values)), return_shape=True
        )(*leaves)
        inlined = equations(closed.jaxpr, _is_inlined)
        names, program = {equation.primitive.name for equation in inlined}, clamped(closed.jaxpr)
        if program is closed.jaxpr and not any(pattern <= names for pattern in PATTERNS):
            return function(*args)
        found = _rewritten(program, closed.consts, [_Node(leaf) for leaf in leaves])
        return jax.tree.unflatten(jax.tree.structure(shape), [node.value for node in found])

    return rewritten


def _is_inlined(equation: Any) -> bool:
    return equation.primitive.name in ("jit", "pjit") and equation.params.get("name") != VOUCHED


PATTERNS = ({"exp", "log1p"}, {"exp", "log"}, {"abs", "erf", "erfc", "select_n"}, {"lgamma", "log1p", "select_n"})


def _rewritten(jaxpr, consts, args: list[_Node]) -> list[_Node]:
    return [_node(found) for found in evaluate(jaxpr, list(map(_Node, consts)), args, _rewritten_equation)]


def _node(value: Any) -> _Node:
    return value if isinstance(value, _Node) else _Node(value, "literal")


def _rewritten_equation(equation, values) -> list[_Node]:
    name, nodes = equation.primitive.name, list(map(_node, values))
    if _is_inlined(equation):
        return _rewritten(*called(equation), nodes)
    inside = _softplus_argument(nodes) if name == "add" else _exponent_of_one_more(name, nodes)
    below = _normal_argument(nodes) if name == "select_n" else None
    plain = _log_beta(nodes) if name == "select_n" else None
    if inside is not None:
        results = [jnp.logaddexp(inside.value, jnp.zeros((), jnp.result_type(inside.value)))]
    elif below is not None:
        results = [lax.erfc(-below.value)]
    elif plain is not None:
        x, y = (jnp.broadcast_to(part.value, jnp.shape(nodes[1].value)) for part in plain)
        results = [lax.lgamma(x) + (lax.lgamma(y) - lax.lgamma(x + y))]
    else:
        results = bind(equation, [node.value for node in nodes])
    return [_Node(result, name, tuple(nodes), equation) for result in results]


def bind(equation, values) -> list[Any]:
    """An equation evaluated without change, as made on its own line."""
    from jax._src import source_info_util

    # Before JAX 0.10 functions among the parameters came apart from them.
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with source_info_util.user_context(equation.source_info.traceback):
        found = equation.primitive.bind(*functions, *values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _softplus_argument(nodes: list[_Node]) -> _Node | None:
    """``x`` if these two are ``max(x, 0)`` and ``log1p(exp(−|x|))``."""
    for larger, rest in (nodes, nodes[::-1]):
        chain = rest
        for name in ("log1p", "exp", "neg", "abs"):
            if chain.name != name:
                break
            chain = chain.inputs[0]
        else:
            if larger.name == "max" and any(
                one is chain and _is_zero(other) for one, other in (larger.inputs, larger.inputs[::-1])
            ):
                return chain
    return None


def _normal_argument(nodes: list[_Node]) -> _Node | None:
    """``x`` if this is the choice between ``1 + erf(x)`` and, by the sign of x, ``2 − erfc(|x|)`` and ``erfc(|x|)``."""
    if [node.name for node in nodes] != ["lt", "select_n", "add"]:
        return None
    which, far, near = nodes
    if near.inputs[1].name != "erf" or len(far.inputs) != 3:
        return None
    x, (sign, below, above) = near.inputs[1].inputs[0], far.inputs
    size = which.inputs[0]
    found = (
        (size.name, below.name, above.name, sign.name) == ("abs", "erfc", "sub", "gt")
        and size.inputs[0] is x and sign.inputs[0] is x and _is(0.0, sign.inputs[1])
        and below.inputs[0] is size and _is(1.0, near.inputs[0]) and _is(2.0, above.inputs[0])
        and above.inputs[1].name == "erfc" and above.inputs[1].inputs[0] is size
    )  # fmt: skip
    return x if found else None


def _log_beta(nodes: list[_Node]) -> tuple[_Node, ...] | None:
    """The arguments of JAX's ``betaln`` if this is its choice of a formula; the one with three `lgamma` always holds."""
    which, near = nodes[0], nodes[-1]
    if which.name != "lt" or near.name != "add" or [part.name for part in near.inputs] != ["lgamma", "sub"]:
        return None
    trace = which.equation.source_info.traceback
    frames = () if trace is None else trace.frames
    smaller = near.inputs[0].inputs[0]
    if not any(frame.function_name == "betaln" and is_of_jax(frame.file_name) for frame in frames):
        return None
    return smaller.inputs if smaller.name == "min" else None


def _is(number: float, node: _Node) -> bool:
    return node.name == "literal" and bool(np.all(node.value == number))


def _exponent_of_one_more(name: str, nodes: list[_Node]) -> _Node | None:
    """``x`` if this is ``log1p(e^x)`` or ``log(1 + e^x)``."""
    if name == "log1p":
        return _exponent(nodes[0])
    if name != "log" or nodes[0].name != "add":
        return None
    for one, other in (nodes[0].inputs, nodes[0].inputs[::-1]):
        if (number := _literal(one)) is not None and np.all(number == 1.0):
            return _exponent(other)
    return None


def _exponent(node: _Node) -> _Node | None:
    """``x`` if the value is ``e^x``: an exponential, a whole power of one, a product of two or with a positive number."""
    if node.name == "exp":
        return _Node(node.inputs[0].value)
    if node.name in ("square", "integer_pow"):
        power, base = node.equation.params.get("y", 2), _exponent(node.inputs[0])
        return None if base is None else _Node(power * base.value)
    if node.name not in ("mul", "div"):
        return None
    exponents = [_exponent(part) for part in node.inputs]
    one, other = (found or _log_of_literal(part) for found, part in zip(exponents, node.inputs, strict=True))
    if one is None or other is None or not any(exponents):
        return None
    return _Node(one.value + other.value if node.name == "mul" else one.value - other.value)


def _log_of_literal(node: _Node) -> _Node | None:
    number = _literal(node)
    return _Node(np.log(number)) if number is not None and np.all(number > 0) else None


def _literal(node: _Node) -> Any:
    while node.name in ("convert_element_type", "broadcast_in_dim"):
        node = node.inputs[0]
    return node.value if node.name == "literal" else None


def _is_zero(node: _Node) -> bool:
    return (number := _literal(node)) is not None and not np.any(number)


# Indices that promise to be in range -----------------------------------------------------------------------------------


# The mode that describes what is computed when the promise is broken.
CLAMPED = {"gather": lax.GatherScatterMode.CLIP}
DROPPED = lax.GatherScatterMode.FILL_OR_DROP


def clamped(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same program with promised indices clamped, or dropped where they are written to; itself if there are none."""
    equations = [_clamped_equation(equation) for equation in jaxpr.eqns]
    if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=equations)


def _clamped_equation(equation: Any) -> Any:
    name, changed = equation.primitive.name, {}
    if equation.params.get("mode") == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        changed["mode"] = CLAMPED.get(name, DROPPED)
    for key, value in equation.params.items():
        if name.startswith("custom_"):
            # A function with a derivative of its own, which is kept as it is.
            break
        new = _within(value)
        if new is not value:
            changed[key] = new
    return equation.replace(params={**equation.params, **changed}) if changed else equation


def _within(value: Any) -> Any:
    """A parameter of an equation, with the programs in it clamped."""
    if isinstance(value, core.ClosedJaxpr):
        inner = clamped(value.jaxpr)
        return value if inner is value.jaxpr else value.replace(jaxpr=inner)
    if isinstance(value, core.Jaxpr):
        return clamped(value)
    if isinstance(value, tuple) and any(isinstance(part, (core.ClosedJaxpr, core.Jaxpr)) for part in value):
        parts = tuple(map(_within, value))
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    return value
