"""After sampling: how well the model fits and predicts. Computed at the sites, which release summaries only."""

from fedpdmc.assessment.all_sites import Assessment, assess, compare, heterogeneity
from fedpdmc.assessment.average_effects import effects
from fedpdmc.assessment.contrasts import contrasts, ratios
from fedpdmc.assessment.predict import predict

__all__ = ["Assessment", "assess", "compare", "contrasts", "effects", "heterogeneity", "predict", "ratios"]
