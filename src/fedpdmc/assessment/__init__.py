"""After sampling: how well the model fits and predicts, worked out at the sites, of which only summaries leave."""

from fedpdmc.assessment.contrasts import contrasts, ratios
from fedpdmc.assessment.predict import effects, predict
from fedpdmc.assessment.whole import Assessment, assess, compare, heterogeneity

__all__ = ["Assessment", "assess", "compare", "contrasts", "effects", "heterogeneity", "predict", "ratios"]
