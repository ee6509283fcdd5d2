"""What a site knows of its own private latents after a run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True, eq=False)
class LatentPosterior:
    """Draws of a site's private latents, each with the draw of the shared parameters that it belongs to.

    Attributes
    ----------
    times : (n,)
        Process times, the ends of blocks.
    theta : (chains, n, d)
        The shared parameters.
    z : (chains, n, k)
        The latents.
    names : tuple of str
        Of the latents.
    """

    times: np.ndarray
    theta: np.ndarray
    z: np.ndarray
    names: tuple[str, ...]

    def summary(self) -> pd.DataFrame:
        """Mean, standard deviation and quantiles of each latent, as a table of pandas."""
        import pandas as pd

        flat = self.z.reshape(-1, self.z.shape[-1])
        table = {"mean": flat.mean(0), "sd": flat.std(0, ddof=1)}
        table |= {f"{100 * q:g}%": np.quantile(flat, q, axis=0) for q in (0.025, 0.5, 0.975)}
        return pd.DataFrame(table, index=pd.Index(self.names, name="effect"))
