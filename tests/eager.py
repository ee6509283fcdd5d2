"""Functions of arrays computed operation by operation, where there are many of them and compiling each would take longer."""

import jax
import jax.numpy as jnp

from fedpdmc._jax.programs import INNER, called, evaluate


def eagerly(function, *args):
    """The value of a function of arrays."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shape), _run(closed.jaxpr, closed.consts, jax.tree.leaves(args)))


def eagerly_mapped(function, *args):
    """The values of a function at the rows of arrays."""
    return eagerly(jax.vmap(function), *args)


def _run(jaxpr, consts, args):
    def step(equation, values):
        if equation.primitive.name in INNER:
            return _run(*called(equation), values)
        found = equation.primitive.bind(*map(jnp.asarray, values), **equation.params)
        return found if equation.primitive.multiple_results else [found]

    return evaluate(jaxpr, consts, args, step)
