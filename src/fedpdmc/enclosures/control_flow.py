"""Branches, loops, linear solves and factorisations within a program that is evaluated on enclosures."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpdmc._jax.by_numpy import scan_lengths
from fedpdmc.enclosures import triangular
from fedpdmc.enclosures.cancelling_shifts import settled
from fedpdmc.enclosures.domain import Domain, Form, is_point, is_zero, shape_of
from fedpdmc.enclosures.shared_rules import picked_case

# Evaluates a program on a domain: the interpreter's `run`.
Run = Callable[..., list[Form]]


def _cond(domain: Domain, run: Run, equation, forms) -> list[Form]:
    """Branches: the index must be a point."""
    index, *operands = forms
    if not is_point(index):
        raise NotImplementedError("its condition depends on the parameters")
    branches = equation.params["branches"]
    if domain.eager:
        branch = branches[min(max(int(index), 0), len(branches) - 1)]
        return run(domain, branch.jaxpr, branch.consts, operands)
    outs = [
        [settled(domain, form) for form in run(domain, branch.jaxpr, branch.consts, operands)] for branch in branches
    ]
    return [picked_case(domain, index, cases) for cases in zip(*outs, strict=True)]


def _scan(domain: Domain, run: Run, equation, forms) -> list[Form]:
    """A loop of fixed length: carried values that may vary are enclosures with every part an array."""
    params = equation.params
    n_consts, n_carry = scan_lengths(params)
    consts, carry, xs = forms[:n_consts], list(forms[n_consts : n_consts + n_carry]), forms[n_consts + n_carry :]
    inner, length, reverse = params["jaxpr"], params["length"], params["reverse"]

    def body(carry, x):
        out = [settled(domain, form) for form in run(domain, inner.jaxpr, inner.consts, [*consts, *carry, *x])]
        return out[:n_carry], out[n_carry:]

    if length == 0:
        return [
            *carry,
            *(np.zeros(variable.aval.shape, variable.aval.dtype) for variable in equation.outvars[n_carry:]),
        ]
    if domain.eager:
        return _unrolled(domain, body, carry, xs, length, reverse)
    first = [_entry(domain, x, 0) for x in xs]
    # A carried zero hides what it is multiplied with: the loop is then traced once more with the value after the first step.
    hidden, probe = any(is_point(form) and is_zero(form) for form in carry), carry
    for _ in range(len(carry) + 2):
        after = body(probe, first)[0]
        varies = [is_point(old) and not is_point(new) for old, new in zip(carry, after, strict=True)]
        carry = [
            domain.full(old, new) if varied or not is_point(old) else old
            for old, new, varied in zip(carry, after, varies, strict=True)
        ]
        if not any(varies) and not hidden:
            break
        hidden = False
        probe = [new if is_point(old) else old for old, new in zip(carry, after, strict=True)]

    def step(carry, x):
        out, ys = body(carry, x)
        return [domain.full(new, old) if not is_point(old) else new for old, new in zip(carry, out, strict=True)], ys

    xs = [x if is_point(x) else domain.fields(lambda part: part, x) for x in xs]
    last, ys = lax.scan(step, carry, xs, length, reverse)
    return [*last, *ys]


def _entry(domain: Domain, x: Form, at: int) -> Form:
    """One entry along the first axis."""
    return jnp.asarray(x)[at] if is_point(x) else domain.fields(lambda part: part[at], x)


def _unrolled(domain: Domain, body: Callable, carry: list[Form], xs, length: int, reverse: bool) -> list[Form]:
    """A loop step by step."""
    steps = []
    for i in range(length)[:: -1 if reverse else 1]:
        carry, ys = body(carry, [_entry(domain, x, i) for x in xs])
        steps.append(ys)

    def stacked(parts: tuple[Form, ...]) -> Form:
        if all(is_point(part) for part in parts):
            return np.stack(parts)
        return domain.fields(lambda *entries: jnp.stack(entries), *parts)

    return [*carry, *map(stacked, zip(*steps[:: -1 if reverse else 1], strict=True))]


def _while(domain: Domain, run: Run, equation, forms) -> list[Form]:
    raise NotImplementedError("a loop whose length is not fixed")


def _linear_solve(domain: Domain, run: Run, equation, forms) -> list[Form]:
    """``A⁻¹ b`` by the program's own solver, for a constant matrix."""
    params = equation.params
    counts, solver = params["const_lengths"], params["jaxprs"].solve
    total = sum(counts)
    before = counts.matvec + counts.vecmat
    consts = forms[before : before + counts.solve]
    if not all(is_point(form) for form in forms[:total]):
        raise NotImplementedError("its matrix depends on the parameters")
    return [settled(domain, form) for form in run(domain, solver.jaxpr, solver.consts, [*consts, *forms[total:]])]


def _factorised(domain: Domain, run: Run, equation, forms) -> list[Form] | None:
    """A Cholesky factor or a triangular solve (`triangular`); None if the matrix is constant: there is a rule for that."""
    name, params = equation.primitive.name, equation.params
    matrix, *others = forms
    if is_point(matrix):
        return None
    if domain.eager:
        raise NotImplementedError("a matrix that depends on the parameters, on balls")
    triangular.check_rows(shape_of(matrix))
    known = domain.still(lambda middle: triangular.inverses(name, params, middle), matrix)
    wider = domain.wider(lambda size: triangular.backward_error(name, size), matrix)
    args = [wider, *others, *known]
    program = triangular.factor_program(name, params, len(shape_of(matrix)))
    closed = jax.make_jaxpr(program)(*(jax.ShapeDtypeStruct(shape_of(form), matrix.dtype) for form in args))
    return [settled(domain, form) for form in run(domain, closed.jaxpr, closed.consts, args)]


CONTROL: dict[str, Callable[..., list[Form] | None]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_linear_solve": _linear_solve,
    "cholesky": _factorised,
    "triangular_solve": _factorised,
}
