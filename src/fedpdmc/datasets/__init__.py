"""Small data sets that ship with the package, as plain NumPy arrays."""

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import polars as pl
from jaxtyping import Float
from numpy import ndarray

# Public constants, fixed before any record is seen: hospitals can agree on them without exchanging a summary.
RISK_CENTER = 2.5
AGE_CENTER = 45.0


@dataclass(frozen=True, eq=False)
class Hospital:
    """One hospital's records: design matrix ``X`` of shape (n, 5) and outcomes ``y`` of shape (n,), zeros and ones."""

    name: str
    X: Float[ndarray, "n d"]
    y: Float[ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Trial:
    """A trial in several hospitals, and the names of the columns of every hospital's ``X``."""

    hospitals: tuple[Hospital, ...]
    names: tuple[str, ...]


def indomethacin() -> Trial:
    """Rectal indomethacin against placebo to prevent pancreatitis after ERCP: 602 patients in four hospitals.

    Elmunzer et al., *New England Journal of Medicine* 366:1414-1422, 2012; six columns of ``indo_rct`` of the R package
    medicaldata (MIT licence). The outcome is post-ERCP pancreatitis. The columns of ``X`` are

    - ``intercept``: 1, so that its coefficient is the log odds for a woman of 45 on placebo with risk score 2.5;
    - ``indomethacin``: 1 for the drug, 0 for placebo;
    - ``risk``: the trial's risk score in points, less 2.5;
    - ``age``: in units of ten years, less 45 years;
    - ``male``: 1 for men, 0 for women.

    Returns
    -------
    Trial
        Hospitals in falling order of size: Indiana (413 patients), Michigan (164), Kentucky (22) and Case Western (3,
        none of whom had the outcome).
    """
    full = {"IU": "Indiana", "UM": "Michigan", "UK": "Kentucky", "Case": "Case Western"}
    with files("fedpdmc.datasets").joinpath("indomethacin.csv").open("rb") as lines:
        table = pl.read_csv(lines, comment_prefix="#")
    site, drug, gender = (table[name].to_numpy() for name in ("site", "rx", "gender"))
    risk, age, outcome = (table[name].to_numpy().astype(float) for name in ("risk", "age", "outcome"))
    X = np.c_[
        np.ones(len(table)), drug == "indomethacin", risk - RISK_CENTER, (age - AGE_CENTER) / 10.0, gender == "male"
    ]
    hospitals = tuple(Hospital(name, X[site == short], outcome[site == short]) for short, name in full.items())
    return Trial(hospitals, ("intercept", "indomethacin", "risk", "age", "male"))
