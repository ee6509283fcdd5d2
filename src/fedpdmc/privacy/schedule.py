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
# Two steps find the mode so well that the log likelihood is nearly quadratic over what the noise of the third leaves open
# (with less for them, intervals at 0.95 covered 0.90 where noise is large); the third is what the answer is made of.
ONE_SHOT = Schedule((0.15, 0.25, 0.6), 0.8, usual=1 - 2.0**-30)
