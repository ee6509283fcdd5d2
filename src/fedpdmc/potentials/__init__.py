"""Potentials: what is sampled."""

from fedpdmc.potentials.base import Field, LatentPotential, Potential, RateBound, Sum
from fedpdmc.potentials.bent_spread_prior import BentSpreadPrior, ScaleLaw, ScaleMixture
from fedpdmc.potentials.jax_function import Program, program_of
from fedpdmc.potentials.latent_program import LatentProgram
from fedpdmc.potentials.linear_predictor import (
    CubicRemainder,
    LinearPredictor,
    PriorShare,
    beside_taylor,
    cubic_remainder,
    records_of,
)
from fedpdmc.potentials.losses import Logistic, Loss, Poisson, StudentT
from fedpdmc.potentials.quadratic import ControlVariate, GaussianRecords, Quadratic, bare, local_quadratic
from fedpdmc.potentials.random_effects import RandomEffects
from fedpdmc.potentials.unknown_scale import LinearUnknownScale

__all__ = [
    "BentSpreadPrior", "ControlVariate", "CubicRemainder", "Field", "GaussianRecords", "LatentPotential",
    "LatentProgram", "LinearPredictor", "LinearUnknownScale", "Logistic", "Loss", "Poisson", "Potential", "Program",
    "PriorShare", "Quadratic", "RandomEffects", "RateBound", "ScaleLaw", "ScaleMixture", "StudentT", "Sum", "bare",
    "beside_taylor", "cubic_remainder", "local_quadratic", "program_of", "records_of",
]  # fmt: skip
