"""One function for each rule, with the box that its argument, a vector of four numbers, is taken from."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.scipy import special

RNG = np.random.default_rng(0)
A = RNG.normal(size=(3, 4))
SPD = A.T @ A + np.eye(4)
TRIANGLE = np.tril(RNG.normal(size=(4, 4))) + 3 * np.eye(4)
INDEX = np.array([2, 0, 0, 3, 1])


def one_minus_square():
    """The primitive of JAX 0.11 that is the derivative of tanh, made here for versions without it."""

    def plain(x):
        return 1 - x * x

    primitive = Primitive("one_minus_square")
    primitive.def_impl(plain)
    primitive.def_abstract_eval(lambda x: x)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    return primitive.bind


@jax.custom_jvp
def cubed(x):
    return x * x * x


cubed.defjvp(lambda primals, tangents: (cubed(*primals), 3 * primals[0] ** 2 * tangents[0]))


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


def by_scan(x):
    def step(carry, y):
        carry = 0.5 * carry + jnp.tanh(y)
        return carry, carry * y

    last, steps = lax.scan(step, 0.0, x)
    return jnp.concatenate([last[None], steps])


def guarded(x):
    return jnp.where(jnp.isfinite(x) & ~jnp.isnan(x), x * x, 0.0)


def kernel(x):
    """A covariance matrix with a scale and a range that are parameters."""
    distance = np.abs(np.arange(3.0)[:, None] - np.arange(3.0))
    return jnp.exp(x[0] - jnp.exp(x[1]) * distance) + 0.5 * jnp.eye(3)


def gaussian_process(x):
    """Minus the log density of a Gaussian process at three places."""
    factor = jnp.linalg.cholesky(kernel(x))
    residual = jax.scipy.linalg.solve_triangular(factor, x[1:], lower=True)
    return 0.5 * jnp.sum(residual**2) + jnp.sum(jnp.log(jnp.diagonal(factor)))


def solves(x):
    """Triangular systems of all kinds whose matrix is a parameter."""
    a = kernel(x)[:2, :2]
    sides = [
        lax.linalg.triangular_solve(
            a, x.reshape(2, 2), left_side=left, lower=lower, transpose_a=turned, unit_diagonal=turned
        )
        for left in (True, False)
        for lower in (True, False)
        for turned in (True, False)
    ]
    return jnp.concatenate([side.ravel() for side in sides])


ELEMENTWISE = {
    "exp": (jnp.exp, -3, 3),
    "exp2": (jnp.exp2, -3, 3),
    "expm1": (jnp.expm1, -3, 3),
    "log": (jnp.log, 0.05, 4),
    "log1p": (jnp.log1p, -0.9, 3),
    "logistic": (jax.nn.sigmoid, -6, 6),
    "tanh": (jnp.tanh, -3, 3),
    "one_minus_square": (one_minus_square(), -1.2, 1.2),
    "softplus": (jax.nn.softplus, -6, 6),
    "log_sigmoid": (jax.nn.log_sigmoid, -6, 6),
    "logaddexp": (lambda x: jnp.logaddexp(x, 2 * x[::-1]), -3, 3),
    "derivative of logaddexp": (jax.grad(lambda x: jnp.sum(jnp.logaddexp(x, 2 * x[::-1]))), -3, 3),
    "sqrt": (jnp.sqrt, 0.01, 4),
    "rsqrt": (lax.rsqrt, 0.05, 4),
    "cbrt": (jnp.cbrt, -3, 3),
    "sin": (jnp.sin, -10, 10),
    "cos": (jnp.cos, -10, 10),
    "atan": (jnp.arctan, -3, 3),
    "sinh": (jnp.sinh, -3, 3),
    "cosh": (jnp.cosh, -3, 3),
    "asinh": (jnp.arcsinh, -3, 3),
    "erf": (lax.erf, -3, 3),
    "erfc": (lax.erfc, -3, 3),
    "erf_inv": (lax.erf_inv, -0.95, 0.95),
    "ndtr": (special.ndtr, -6, 6),
    "log_ndtr": (special.log_ndtr, -30, 8),
    "lgamma": (lax.lgamma, 0.1, 6),
    "digamma": (lax.digamma, 0.1, 6),
    "polygamma": (jax.grad(lambda x: jnp.sum(lax.digamma(x))), 0.2, 6),
    "square": (jnp.square, -3, 3),
    "integer_pow": (lambda x: x**3 - x**-2, -3, 3),
    "pow": (lambda x: x**1.7 + 2.0**x + x ** x[::-1], 0.1, 3),
    "mul": (lambda x: x * x[::-1], -3, 3),
    "div": (lambda x: x / (x[::-1] + 0.5), -0.4, 3),
    "add, sub, neg": (lambda x: -x + 3 * x[::-1] - 1.0, -3, 3),
    "abs, sign": (lambda x: jnp.abs(x) + 0.5 * jnp.sign(x), -3, 3),
    "floor, ceil, round": (lambda x: jnp.floor(x) + jnp.ceil(x) + jnp.round(x), -3, 3),
    "max, min": (lambda x: jnp.maximum(x, 0.5) - jnp.minimum(x, x[::-1]), -3, 3),
    "clamp": (lambda x: lax.clamp(-1.0, x, 1.5), -3, 3),
    "where": (lambda x: jnp.where((x > 0.3) & ~(x >= 2.0) | (x < -2.0), 2 * x, -x), -3, 3),
    "eq, ne, le, xor": (lambda x: jnp.where((x <= 0) ^ (x != x[::-1]), x, 1.0) + (x == 0.0), -3, 3),
    "guards": (guarded, -3, 3),
    "types": (lambda x: x.astype(jnp.float32).astype(jnp.float64) + (x > 0).astype(float), -3, 3),
}

ARRAYS = {
    "dot_general": (lambda x: A @ x, -3, 3),
    "dot_general, both": (lambda x: x @ jnp.outer(x, x[::-1]), -2, 2),
    "reduce_sum": (lambda x: jnp.sum(x.reshape(2, 2), 1), -3, 3),
    "reduce_prod": (jnp.prod, -2, 2),
    "reduce_max": (jnp.max, -3, 3),
    "reduce_min": (jnp.min, -3, 3),
    "any, all": (lambda x: jnp.where(jnp.any(x > 1) | jnp.all(x < 0), x, -x), -3, 3),
    "cumsum": (jnp.cumsum, -3, 3),
    "cumprod": (jnp.cumprod, -2, 2),
    "cummax, cummin": (lambda x: lax.cummax(x) - lax.cummin(x, reverse=True), -3, 3),
    "cumlogsumexp": (lax.cumlogsumexp, -3, 3),
    "logsumexp": (lambda x: special.logsumexp(x.reshape(2, 2), -1), -3, 3),
    "softmax": (jax.grad(lambda x: special.logsumexp(x)), -3, 3),
    "log_softmax": (jax.nn.log_softmax, -3, 3),
    "gather": (lambda x: x[INDEX], -3, 3),
    "tile": (lambda x: jnp.tile(x, (2, 3)), -3, 3),
    "scatter-add": (lambda x: jnp.zeros(3).at[np.array([0, 2, 2, 1])].add(x), -3, 3),
    "scatter": (lambda x: jnp.ones(6).at[np.array([0, 5, 2, 1])].set(x), -3, 3),
    "pad, rev, concatenate": (lambda x: jnp.concatenate([jnp.pad(x, 1), x[::-1]]), -3, 3),
    "stack, split, transpose": (lambda x: sum(jnp.split(jnp.stack([x, 2 * x]).T, 2)), -3, 3),
    "dynamic_slice": (lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (1,), (2,)), (2,)), -3, 3),
    "triangular_solve": (lambda x: jax.scipy.linalg.solve_triangular(TRIANGLE, x, lower=True), -3, 3),
    "cholesky": (lambda x: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(SPD), True), x), -3, 3),
    "cholesky of parameters": (lambda x: jnp.linalg.cholesky(kernel(x)), -1, 1),
    "triangular_solve of parameters": (solves, -1, 1),
    "gradient of a Gaussian process": (jax.grad(gaussian_process), -1, 1),
    "linear_solve": (lambda x: jnp.linalg.solve(SPD, x), -3, 3),
    "scan": (by_scan, -3, 3),
    "fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + x[i], x), -3, 3),
    "cond": (lambda x: lax.cond(A[0, 0] > 0, jnp.exp, jnp.cos, x), -3, 3),
    "jit, remat": (jax.checkpoint(jax.jit(lambda x: jnp.exp(x) * x)), -3, 3),
    "custom_jvp, custom_vjp": (lambda x: cubed(x) + doubled(x), -3, 3),
}
