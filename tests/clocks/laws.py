"""Arrivals of many chains on one plan, and whether two lots of them have one law."""

import jax
import numpy as np
from scipy import stats

from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import answer

answered = compiled(answer)


def heard(clock, plan, seed):
    """Times, marks and passes."""
    arrival, walk = answered(clock, chain_keys(jax.random.key(seed), plan.number.shape[0]), plan)
    assert not np.any(walk.fault)
    return np.asarray(arrival.time), np.asarray(arrival.mark), np.asarray(walk.passes)


def agree(one, other):
    """p values of the times, and of the marks."""
    table = np.asarray([np.bincount(x[1], minlength=8) for x in (one, other)])
    table = table[:, table.sum(0) > 0]
    return stats.ks_2samp(one[0], other[0]).pvalue, stats.chi2_contingency(table).pvalue
