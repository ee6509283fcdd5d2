"""From a Python function to a program of a model file, on the author's machine: traced by JAX, written out, translated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from fedpdmc._jax.programs import INNER, called, evaluate, prune, scan_lengths
from fedpdmc.enclosures.continuity import is_vouched
from fedpdmc.enclosures.known_functions import line_of, name_of_call
from fedpdmc.errors import InputError
from fedpdmc.models.model_file.allowed_operations import (
    BINARY,
    OPERATIONS,
    RENAMED,
    UNARY,
    WHOLE_CALLS,
    Equation,
    FileProgram,
    Literal,
    Name,
    NotAllowed,
    Operand,
    Type,
)

# The longest loop that is written out.
LONGEST_LOOP = 64
# The most rows of a matrix that is factored.
LARGEST_MATRIX = 6
# Derivatives of these functions, taken from their formula, are right.
WRITTEN_OUT = ("relu", "silu", "logsumexp", "logcumsumexp")
CALL = "Model(function)"


def trace(function: Callable[..., Any], inputs: Mapping[str, Type], groups: Mapping[str, list[str]]) -> FileProgram:
    """The program of ``function(*mappings)``, where each mapping holds some of the inputs by name.

    Parameters
    ----------
    function : callable
        Returns a number, or a dict of arrays.
    inputs : mapping
        Types of all inputs.
    groups : mapping
        For each argument of the function, the names of the inputs that it holds.

    Raises
    ------
    InputError
        The function raises an error, or does something that a model file cannot hold; names the line.
    """
    names = [name for group in groups.values() for name in group]
    labels: list[str] = []

    def flat(*values):
        known = dict(zip(names, values, strict=True))
        found = function(*({name: known[name] for name in group} for group in groups.values()))
        labels[:] = list(found) if isinstance(found, dict) else [""]
        return [jnp.asarray(x) for x in (found.values() if isinstance(found, dict) else [found])]

    samples = [jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype) for name in names]
    try:
        closed = jax.make_jaxpr(flat)(*samples)
    except Exception as error:
        raise InputError(
            CALL,
            f"a function that raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "Give a JAX function f(x, row) of the declared parameters and columns of one record.",
        ) from error
    closed = prune(jax.make_jaxpr(lambda *values: _written_out(closed.jaxpr, closed.consts, values))(*samples))
    return _Translation(closed, names).program(labels)


# Written out ----------------------------------------------------------------------------------------------------------


def _written_out(jaxpr, consts, args) -> list[Any]:
    """Evaluate a program with the functions that it calls put in their places, and loops of fixed length unrolled."""
    return evaluate(jaxpr, consts, args, _one)


def _one(equation, values) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in INNER:
        return _call(equation, values)
    if name == "scan":
        return _loop(equation, values)
    if name in ARRANGED:
        return ARRANGED[name](params, values)
    if name in FACTORED:
        if values[0].ndim != 2 or values[0].shape[0] > LARGEST_MATRIX:
            why = (
                f"it has shape {values[0].shape}: one square matrix of at most {LARGEST_MATRIX} rows can be written out"
            )
            raise _refused(equation, name, why)
        return FACTORED[name](params, values)
    if name == "cond":
        raise _refused(equation, name, "both cases of a record are computed, so use jnp.where")
    if name in ("copy", "copy_p", "optimization_barrier"):
        return list(values)
    if RENAMED.get(name, name) not in OPERATIONS:
        raise _refused(equation, name, "it is not in the table of operations")
    found = equation.primitive.bind(*values, **equation.params)
    return list(found) if equation.primitive.multiple_results else [found]


def _split(params, values) -> list[Any]:
    ends = np.cumsum((0, *params["sizes"]))
    cuts = zip(ends[:-1], ends[1:], strict=True)
    return [lax.slice_in_dim(values[0], int(a), int(b), axis=params["axis"]) for a, b in cuts]


def _stack(params, values) -> list[Any]:
    axis = params["axis"]
    return [lax.concatenate([lax.expand_dims(value, (axis,)) for value in values], axis)]


def _unstack(params, values) -> list[Any]:
    axis = params["axis"]
    count = values[0].shape[axis]
    return [lax.index_in_dim(values[0], i, axis, keepdims=False) for i in range(count)]


def _tile(params, values) -> list[Any]:
    found = values[0]
    for axis, times in enumerate(params["reps"]):
        found = lax.concatenate([found] * times, axis) if times > 1 else found
    return [found]


# Operations that only arrange entries, written with slices and concatenations.
ARRANGED = {"split": _split, "stack": _stack, "unstack": _unstack, "tile": _tile}


def _entry(matrix, i: int, j: int):
    return lax.reshape(lax.slice(matrix, (i, j), (i + 1, j + 1)), ())


def _less(total, products):
    for one, other in products:
        total = total - one * other
    return total


def _cholesky(params, values) -> list[Any]:
    """``L_jj = √(A_jj − Σ_k L_jk²)`` and ``L_ij = (A_ij − Σ_k L_ik L_jk)/L_jj``, column by column."""
    matrix = values[0]
    n, found = matrix.shape[0], {}
    for j in range(n):
        for i in range(j, n):
            rest = _less(_entry(matrix, i, j), [(found[i, k], found[j, k]) for k in range(j)])
            found[i, j] = lax.sqrt(rest) if i == j else rest / found[j, j]
    zero = np.zeros((1,))
    entries = [lax.reshape(found[i, j], (1,)) if i >= j else zero for i in range(n) for j in range(n)]
    return [lax.reshape(lax.concatenate(entries, 0), (n, n))]


def _triangular_solve(params, values) -> list[Any]:
    """Substitution, row by row; from the right it is that of the transposed matrices."""
    matrix, right = values
    left, lower = params["left_side"], params["lower"]
    if params["transpose_a"] == left:
        matrix, lower = lax.transpose(matrix, (1, 0)), not lower
    right = right if left else lax.transpose(right, (1, 0))
    n, found = matrix.shape[0], {}
    for i in range(n) if lower else range(n - 1, -1, -1):
        rest = lax.index_in_dim(right, i, keepdims=False)
        for j, known in found.items():
            rest = rest - lax.broadcast(_entry(matrix, i, j), rest.shape) * known
        own = lax.broadcast(_entry(matrix, i, i), rest.shape)
        found[i] = rest if params["unit_diagonal"] else rest / own
    whole = lax.concatenate([lax.expand_dims(found[i], (0,)) for i in range(n)], 0)
    return [whole if left else lax.transpose(whole, (1, 0))]


# Operations on small matrices, written out entry by entry.
FACTORED = {"cholesky": _cholesky, "triangular_solve": _triangular_solve}


def _call(equation, values) -> list[Any]:
    """A function within the program: kept as a whole, or written out."""
    name = equation.primitive.name
    function = name_of_call(equation)
    if is_vouched(equation):
        raise _refused(equation, "continuous", "a model file takes no assertion: its continuity is shown")
    if function in WHOLE_CALLS:
        return [{**UNARY, **BINARY}[function](*values)]
    if name.startswith("custom") and function not in WRITTEN_OUT:
        raise _refused(equation, function or "a function", "it has a derivative of its own")
    return _written_out(*called(equation), values)


def _loop(equation, values) -> list[Any]:
    """A scan, step by step."""
    params = equation.params
    length, inner = params["length"], params["jaxpr"]
    if length > LONGEST_LOOP:
        raise _refused(equation, "scan", f"it has {length} steps, of which at most {LONGEST_LOOP} can be written out")
    n_consts, n_carry = scan_lengths(params)
    consts, carry = values[:n_consts], values[n_consts : n_consts + n_carry]
    steps: dict[int, list[Any]] = {}
    for i in range(length)[:: -1 if params["reverse"] else 1]:
        entries = [lax.index_in_dim(x, i, keepdims=False) for x in values[n_consts + n_carry :]]
        out = _written_out(inner.jaxpr, inner.consts, [*consts, *carry, *entries])
        carry, steps[i] = out[:n_carry], out[n_carry:]
    rows = [[lax.expand_dims(x, (0,)) for x in steps[i]] for i in range(length)]
    return [*carry, *(lax.concatenate(parts, 0) for parts in zip(*rows, strict=True))]


def _refused(equation, name: str, why: str) -> InputError:
    line = line_of(equation)
    where = f", in {line}" if line else ""
    return InputError(
        CALL, f"{name!r}{where}: {why}", "Write it with the operations that docs/model-files.md lists."
    )  # fmt: skip


# Translated -----------------------------------------------------------------------------------------------------------


class _Translation:
    """Equations of a written-out JAX program as equations of a model file, each value made once."""

    def __init__(self, closed: core.ClosedJaxpr, names: list[str]):
        self.jaxpr = closed.jaxpr
        self.equations: list[Equation] = []
        self.known: dict[Any, Operand] = {v: Name(n) for v, n in zip(self.jaxpr.invars, names, strict=True)}
        # By text: as tuples, the result of equation 2 and the number 2.0 would be equal, and so would 0.0 and −0.0.
        self.made: dict[str, Name] = {}
        for variable, value in zip(self.jaxpr.constvars, closed.consts, strict=True):
            self.known[variable] = self._constant(value)

    def program(self, labels: list[str]) -> FileProgram:
        """Translate the whole program."""
        for equation in self.jaxpr.eqns:
            self._equation(equation)
        results = tuple(zip(labels, (self._operand(atom) for atom in self.jaxpr.outvars), strict=True))
        return FileProgram(tuple(self.equations), results)

    def _add(self, equation: Equation) -> Name:
        text = repr(equation)
        if text not in self.made:
            self.equations.append(equation)
            self.made[text] = Name(len(self.equations))
        return self.made[text]

    def _constant(self, value: Any) -> Operand:
        array = np.asarray(value)
        kind = _kind(array.dtype, CALL)
        if array.ndim == 0:
            return Literal(array.astype(Type(kind).dtype).item())
        values = tuple(array.astype(Type(kind).dtype).ravel().tolist())
        return self._add(Equation("constant", (), (("values", values),), Type(kind, array.shape)))

    def _operand(self, atom: Any) -> Operand:
        return self._constant(atom.val) if isinstance(atom, core.Literal) else self.known[atom]

    def _equation(self, equation) -> None:
        own: str = equation.primitive.name
        name: str = name_of_call(equation) if own in INNER else RENAMED.get(own, own)
        out = equation.outvars[0].aval
        made = Type(_kind(out.dtype, line_of(equation)), tuple(out.shape))
        operands = tuple(self._operand(atom) for atom in equation.invars)
        if name == "convert" and (same := self._same_kind(equation, operands[0], made)) is not None:
            self.known[equation.outvars[0]] = same
            return
        operation = OPERATIONS[name]
        try:
            params = {} if equation.primitive.name in INNER else operation.found(equation.params)
        except NotAllowed as error:
            raise _refused(equation, name, str(error)) from error
        least, most = operation.operands
        if not least <= len(operands) <= most:
            raise _refused(equation, name, f"it has {len(operands)} operands")
        ordered = tuple((key, params[key]) for key in operation.params)
        self.known[equation.outvars[0]] = self._add(Equation(name, operands, ordered, made))

    def _same_kind(self, equation, operand: Operand, made: Type) -> Operand | None:
        """The operand of a conversion that changes nothing; literals are converted here."""
        if isinstance(operand, Literal):
            return Literal(np.asarray(operand.value).astype(made.dtype).item())
        return operand if _kind(equation.invars[0].aval.dtype, "") == made.kind else None


def _kind(dtype: Any, where: str) -> str:
    """The kind of number of a file; narrower whole numbers are taken to 64 bits."""
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        return "f64"
    if dtype.kind in "iu":
        return "i64"
    if dtype.kind == "b":
        return "bool"
    raise InputError(
        where or CALL, f"values of type {dtype}", "A model file holds 64-bit numbers: leave out conversions to others."
    )


# From NumPyro ----------------------------------------------------------------------------------------------------------


NUMPYRO = "Model.from_numpyro(model)"
# Relative difference of a value of two records and of the sum of both: rounding.
ROUNDING = 1e-9


def parts_of(model: Callable, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Model` for a NumPyro model, as `Model.from_numpyro` takes it."""
    from fedpdmc.models import from_numpyro

    kinds: dict[str, Any] = {}
    for name, given in columns.items():
        kinds |= dict(given) if isinstance(given, Mapping) else {name: given}

    def arrays(*rows: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments for some records."""
        found = {}
        for name, given in columns.items():
            members = list(given) if isinstance(given, Mapping) else None
            entries = [row[name] if members is None else jnp.stack([row[m] for m in members]) for row in rows]
            found[name] = jnp.stack(entries)
        return found

    rows = [_usual(kinds, value) for value in (0.3, 0.6)]
    one, two = from_numpyro(model, arrays(rows[0])), from_numpyro(model, arrays(*rows))
    if one.names != two.names:
        raise InputError(
            NUMPYRO,
            "latent variables for each record",
            "Put them outside the plate, or sum them out of the likelihood.",
        )
    function: Any = one.function
    latents = function.latents
    labels = {latent.name: latent.name if latent.real else f"{latent.name}_unconstrained" for latent in latents}

    def flat(x: Mapping[str, Any]) -> Any:
        return jnp.concatenate([jnp.ravel(x[labels[latent.name]]) for latent in latents])

    def likelihood(x: Mapping[str, Any], *records: Mapping[str, Any]) -> Any:
        return function(flat(x), tuple(jax.tree.leaves(arrays(*records))))

    _check_sum(likelihood, {labels[latent.name]: latent.shape for latent in latents}, rows)
    prior = from_numpyro(model, arrays(rows[0]), part="prior")
    assert one.constrain is not None
    constrain = one.constrain
    return {
        "function": likelihood,
        "parameters": {labels[latent.name]: latent.shape for latent in latents},
        "columns": kinds,
        "variables": lambda x: dict(constrain(flat(x))),
        "prior": lambda x: prior.function(flat(x), prior.data),
    }


def _usual(kinds: Mapping[str, Any], value: float) -> dict[str, Any]:
    """A record within its domains."""
    whole = ("binary", "count")
    return {
        name: np.asarray(0 if isinstance(kind, int) else float(value > 0.5) if kind in whole else value)
        for name, kind in kinds.items()
    }


def _check_sum(likelihood: Callable, shapes: Mapping[str, tuple[int, ...]], rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a likelihood of two records that is not the sum of those of each."""
    for at in (0.1, -0.4):
        x = {name: jnp.full(shape, at) for name, shape in shapes.items()}
        whole, parts = float(likelihood(x, *rows)), [float(likelihood(x, row)) for row in rows]
        if not abs(whole - sum(parts)) <= ROUNDING * (1 + abs(whole)):
            raise InputError(
                NUMPYRO,
                "a likelihood of two records that is not the sum of both",
                "Give a model of independent records.",
            )
