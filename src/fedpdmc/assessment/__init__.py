"""After sampling: how well the model fits and predicts. Computed at the sites, which release summaries only."""

from fedpdmc.assessment.all_sites import Assessment, assess, compare, heterogeneity
from fedpdmc.assessment.contrasts import contrasts, ratios
from fedpdmc.assessment.predict import effects, predict

__all__ = ["Assessment", "assess", "compare", "contrasts", "effects", "heterogeneity", "predict", "ratios"]
