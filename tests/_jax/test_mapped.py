"""Functions of stacks: matrices are factorised one after another, since LAPACK calls on stacks may wait for each other."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from tests.support import DYNAMICS

from fedpdmc._jax.compilation import LIBRARY, calls_library, mapped
from fedpdmc.clocks.thinning import time_polynomial
from fedpdmc.potentials import Program

pytestmark = pytest.mark.usefixtures("double")

PLACES = np.linspace(0.0, 3.0, 6)


def kernel(x, data):
    """A Gaussian process with a learned length scale."""
    square = (PLACES[:, None] - PLACES) ** 2
    factor = jnp.linalg.cholesky(jnp.exp(-0.5 * square * jnp.exp(x[0])) + 0.01 * jnp.eye(len(PLACES)))
    return jnp.sum(jnp.logaddexp(0.0, -data * (factor @ x[1:]))) + 0.5 * jnp.sum(x * x)


def line(x, data):
    return 0.5 * jnp.sum((data - x[0]) ** 2) + 0.5 * jnp.sum(x * x)


DATA, DIM = np.array([1.0, 1, -1, 1, -1, -1]), 1 + len(PLACES)


def stacked_calls(function, *args) -> list[str]:
    """Calls of LAPACK on more than one matrix."""

    def found(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name in LIBRARY and any(atom.aval.ndim > 2 for atom in equation.invars):
                yield equation.primitive.name
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
                if is_program(value):
                    yield from found(getattr(value, "jaxpr", value))

    def is_program(value):
        return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))

    return list(found(jax.make_jaxpr(function)(*args).jaxpr))


def test_functions_that_factorise_are_known():
    x = np.zeros(DIM)
    assert calls_library(kernel, x, DATA) and calls_library(jax.grad(kernel), x, DATA)
    assert calls_library(jax.jit(lambda x: jax.lax.scan(lambda c, r: (jnp.linalg.inv(c), r), jnp.eye(2), x)[0]), x)
    assert not calls_library(line, x, DATA)


def test_values_are_those_of_vmap():
    points = np.random.default_rng(0).normal(size=(5, DIM))
    for function in (kernel, line):
        found = mapped(lambda x, f=function: f(x, DATA))(points)
        np.testing.assert_allclose(found, [function(x, DATA) for x in points], rtol=1e-12)


def test_no_stack_of_matrices_is_given_to_lapack():
    points = jnp.asarray(np.random.default_rng(0).normal(size=(5, DIM)))
    # As they are by `jax.vmap`.
    assert {"cholesky", "triangular_solve"} <= set(stacked_calls(jax.vmap(jax.grad(lambda x: kernel(x, DATA))), points))
    program = Program(kernel, jnp.asarray(DATA), DIM, records=len(DATA))
    assert not stacked_calls(program.gradients, points)
    assert not stacked_calls(program.speeds, points, points)
    for kind in ("zigzag", "boomerang"):
        dynamics = DYNAMICS[kind]
        curves, *_ = time_polynomial(program, dynamics)
        assert not stacked_calls(lambda a: curves.along(program, dynamics, a.T, a.T, jnp.full(5, 0.1)), points)  # noqa: B023


RUN = """
import numpy as np, fedpdmc as fp
from tests._jax.test_mapped import kernel, DATA, DIM
post = fp.sample(fp.Site(lambda x, data: kernel(x, data) - 0.5 * (x @ x), data=DATA, name="one"),
                 fp.models.normal_prior(DIM), chains=512, duration=1.0, burn_in=1.0, seed=1, progress=False)
print(np.isfinite(post.mean()).all(), post.certified)
"""


@pytest.mark.long
def test_a_run_with_many_chains_ends():
    """With two threads it waited forever."""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", RUN], capture_output=True, text=True, timeout=300)
    assert found.stdout.split() == ["True", "True"], found.stderr[-2000:]
