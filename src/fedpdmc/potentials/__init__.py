"""WHAT is sampled."""

from fedpdmc.potentials.base import Field, Potential, RateBound, Sum
from fedpdmc.potentials.control import ControlVariate, taylor_quadratic
from fedpdmc.potentials.linear_predictor import LinearPredictor
from fedpdmc.potentials.losses import Logistic, Loss, Poisson, StudentT
from fedpdmc.potentials.polynomial import (
    PolynomialCover,
    PolynomialRemainder,
    known_orders,
    polynomial_on_lines,
    polynomial_remainder,
)
from fedpdmc.potentials.program import Program
from fedpdmc.potentials.quadratic import GaussianRecords, Quadratic
from fedpdmc.potentials.remainder import CubicRemainder, cubic_remainder
from fedpdmc.potentials.shared import Shared
from fedpdmc.potentials.unknown_scale import LinearUnknownScale

__all__ = [
    "ControlVariate",
    "CubicRemainder",
    "Field",
    "GaussianRecords",
    "LinearPredictor",
    "LinearUnknownScale",
    "Logistic",
    "Loss",
    "Poisson",
    "PolynomialCover",
    "PolynomialRemainder",
    "Potential",
    "Program",
    "Quadratic",
    "RateBound",
    "Shared",
    "StudentT",
    "Sum",
    "cubic_remainder",
    "known_orders",
    "polynomial_on_lines",
    "polynomial_remainder",
    "taylor_quadratic",
]
