"""Potentials: what is sampled."""

from fedpdmc.potentials.base import Field, Potential, RateBound, Sum
from fedpdmc.potentials.bent_spread_prior import BentSpreadPrior
from fedpdmc.potentials.control_variate import ControlVariate, local_quadratic
from fedpdmc.potentials.cubic_remainder import CubicRemainder, beside_taylor, cubic_remainder
from fedpdmc.potentials.jax_function import Program
from fedpdmc.potentials.latent import LatentPotential
from fedpdmc.potentials.latent_program import LatentProgram
from fedpdmc.potentials.linear_predictor import LinearPredictor, records_of
from fedpdmc.potentials.losses import Logistic, Loss, Poisson, StudentT
from fedpdmc.potentials.program_taylor import (
    PolynomialCover,
    PolynomialRemainder,
    known_orders,
    polynomial_on_lines,
    polynomial_remainder,
)
from fedpdmc.potentials.quadratic import GaussianRecords, Quadratic, bare
from fedpdmc.potentials.random_effects import RandomEffects
from fedpdmc.potentials.records_with_prior_share import Shared
from fedpdmc.potentials.scale_mixture import ScaleLaw, ScaleMixture
from fedpdmc.potentials.unknown_scale import LinearUnknownScale

__all__ = [
    "BentSpreadPrior",
    "ControlVariate",
    "CubicRemainder",
    "Field",
    "GaussianRecords",
    "LatentPotential",
    "LatentProgram",
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
    "RandomEffects",
    "RateBound",
    "ScaleLaw",
    "ScaleMixture",
    "Shared",
    "StudentT",
    "Sum",
    "bare",
    "beside_taylor",
    "cubic_remainder",
    "known_orders",
    "polynomial_on_lines",
    "polynomial_remainder",
    "records_of",
    "local_quadratic",
]
