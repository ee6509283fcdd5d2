"""Effective sample size and R-hat of draws, coordinates and energy alike, by ArviZ."""

from __future__ import annotations

import warnings

import numpy as np

from fedpdmc.quiet import import_arviz


def energy(draws: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> np.ndarray:
    """``½ (x − m)ᵀ C⁻¹ (x − m)`` of every draw."""
    values, vectors = np.linalg.eigh(cov)
    floor = max(float(values[-1]), 1e-300) * 1e-14
    whitened = (draws - mean) @ (vectors / np.sqrt(np.maximum(values, floor)))
    return 0.5 * np.sum(whitened**2, -1)


def by_quantity(
    function: str, draws: np.ndarray, names: list[str], energies: np.ndarray | None = None
) -> dict[str, float]:
    """ArviZ's ``ess`` (bulk) or ``rhat`` of each quantity, and of the energy where it is given."""
    az = import_arviz()

    # ArviZ splits every chain in two, so that even one chain has an R-hat; it wants at least four draws of each.
    stacked = draws if energies is None else np.concatenate([draws, energies[..., None]], -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measure = getattr(az, function)
        values = [float(measure(np.ascontiguousarray(stacked[..., i]))) for i in range(stacked.shape[-1])]
    if function == "ess":
        values = [min(value, float(draws.shape[0] * draws.shape[1])) for value in values]
    return dict(zip(names if energies is None else [*names, "energy"], values, strict=True))
