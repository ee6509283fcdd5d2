"""WHAT is sampled."""

from fedpdmc.potentials.base import Field, Potential, Sum
from fedpdmc.potentials.control import ControlVariate, taylor_quadratic
from fedpdmc.potentials.linear_predictor import LinearPredictor
from fedpdmc.potentials.losses import Logistic, Loss, Poisson, StudentT
from fedpdmc.potentials.quadratic import Quadratic

__all__ = [
    "ControlVariate",
    "Field",
    "LinearPredictor",
    "Logistic",
    "Loss",
    "Poisson",
    "Potential",
    "Quadratic",
    "StudentT",
    "Sum",
    "taylor_quadratic",
]
