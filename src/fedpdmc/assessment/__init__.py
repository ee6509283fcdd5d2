"""After sampling: how well the model fits and predicts. Computed at the sites, which release summaries only."""

from fedpdmc.assessment.all_sites import Assessment, assess, compare, heterogeneity
from fedpdmc.assessment.predict import contrasts, effects, plot_survival, predict, ratios, survival_curves

__all__ = [
    "Assessment", "assess", "compare", "contrasts", "effects", "heterogeneity", "plot_survival", "predict", "ratios",
    "survival_curves",
]  # fmt: skip
