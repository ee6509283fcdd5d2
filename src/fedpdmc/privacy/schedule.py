"""How a share of a budget is spent on released derivatives, step by step."""

from __future__ import annotations

from typing import NamedTuple

# The name of the method that needs noisy derivatives alone.
PRIVATE_LAPLACE = "private-laplace"


class Schedule(NamedTuple):
    """Costs of the releases of a run: fixed beforehand.

    Attributes
    ----------
    steps : tuple of float
        What each step costs, in proportion.
    gradient : float
        The part of a step's cost that goes to the gradient; the rest to the Hessian.
    usual : float
        The share of the budget that is spent where ``Budget(release=...)`` is zero; zero: none, it is refused.
    """

    steps: tuple[float, ...]
    gradient: float
    usual: float = 0.0


# Newton steps of a private reference.
REFERENCE = Schedule((1.0, 1.0, 1.0, 1.0), 0.5)
# The first step is at the prior's mean and only finds a start; the answer is made of the others together. Newton's method
# needs so many: from the prior's mean, an answer of three steps in all was 0.13 standard deviations of the posterior of
# 4·10⁵ records off, of four 4·10⁻⁴. Later points are nearer to the parameters, so that the log likelihood is quadratic
# up to them: they get more.
ONE_SHOT = Schedule((0.1, 0.2, 0.3, 0.4), 0.8, usual=1 - 2.0**-30)
