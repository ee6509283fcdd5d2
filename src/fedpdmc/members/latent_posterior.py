"""A site's posterior of its own private latents after a run."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedpdmc.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True, eq=False)
class LatentPosterior:
    """Joint draws of a site's private latents and the shared parameters.

    Attributes
    ----------
    times : (n,)
        Process times, the ends of blocks.
    theta : (chains, n, d)
        The shared parameters.
    z : (chains, n, k)
        The latents.
    names : tuple of str
        Names of the latents.
    last : (chains, k) or None
        The state of the latents at the last of these times, in the site's private coordinates: a saved run continues from
        it. None if the site's store has it.
    """

    times: np.ndarray
    theta: np.ndarray
    z: np.ndarray
    names: tuple[str, ...]
    last: np.ndarray | None = None

    def save(self, path: str | Path) -> Path:
        """Write everything to an NPZ file that only its owner can read."""
        path, parts = Path(path), {"times": self.times, "theta": self.theta, "z": self.z, "names": np.array(self.names)}
        parts |= {} if self.last is None else {"last": self.last}
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **parts)
        return path

    @classmethod
    def load(cls, path: str | Path) -> LatentPosterior:
        """Read a file written by `save`.

        Raises
        ------
        InputError
            Not such a file.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                parts = {name: file[name] for name in file.files}
            names = tuple(parts["names"].tolist())
            found = cls(parts["times"], parts["theta"], parts["z"], names, parts.get("last"))
            good = found.z.shape == (*found.theta.shape[:2], len(found.names)) and len(found.times) == found.z.shape[1]
        except (OSError, KeyError, ValueError, AttributeError, zipfile.BadZipFile) as error:
            raise InputError("path", f"{path}: {error}", "Give a file written by LatentPosterior.save.") from error
        if not good:
            raise InputError(
                "path", f"{path}: arrays of inconsistent shapes", "Give a file written by LatentPosterior.save."
            )
        return found

    def followed_by(self, later: LatentPosterior) -> LatentPosterior:
        """Joined with the draws of a run that continued from here."""
        times, theta = np.concatenate([self.times, later.times]), np.concatenate([self.theta, later.theta], 1)
        return LatentPosterior(times, theta, np.concatenate([self.z, later.z], 1), later.names, later.last)

    def summary(self) -> pd.DataFrame:
        """Mean, standard deviation and quantiles of each latent, as a pandas DataFrame."""
        import pandas as pd

        flat = self.z.reshape(-1, self.z.shape[-1])
        table = {"mean": flat.mean(0), "sd": flat.std(0, ddof=1)}
        table |= {f"{100 * q:g}%": np.quantile(flat, q, axis=0) for q in (0.025, 0.5, 0.975)}
        return pd.DataFrame(table, index=pd.Index(self.names, name="effect"))
