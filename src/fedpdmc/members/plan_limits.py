"""Which plans a private site answers: decided from the plan and public facts, before the records are touched."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedpdmc.errors import PlanRefused
from fedpdmc.members.clipping import model_of
from fedpdmc.members.model_file_arrivals import file_ceiling, file_change, file_limits
from fedpdmc.members.run_coordinates import Opening, local_columns, whitened_control
from fedpdmc.members.site import Site
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.rounding_error_bound import COX_REGION, Limits, limits
from fedpdmc.privacy.sensitivity import Model, sensitivity
from fedpdmc.privacy.work_limit import MOST_CELLS, cells, most_passes, steepness

# The largest number and the largest speed in a plan.
LARGEST, FASTEST = 1e15, 1e6


class PlanArrays(NamedTuple):
    """A plan of the coordinates that the site is sent, as NumPy arrays."""

    number: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    velocity: np.ndarray


class PlanLimits:
    """Limits on the plans of one run.

    Parameters
    ----------
    site : Site
        With a budget.
    opening : Opening

    Attributes
    ----------
    rounding : Limits
        The largest distance of plans, and the sensitivity including rounding.
    excess : float
        The rate ρ that the site adds to each coordinate.
    """

    def __init__(self, site: Site, opening: Opening):
        assert isinstance(site.budget, Budget)
        self.site, self.budget, self.dynamics = site, site.budget, opening.dynamics
        # The rows of S, and the centre, of the site's own parameters, over the coordinates that it is sent.
        columns = local_columns(site, opening)
        rows, center = np.asarray(opening.reference.matrix), np.asarray(opening.reference.center)
        if site.coordinates is not None:
            rows, center = rows[site.coordinates], center[site.coordinates]
        self._rows, self._center = rows if columns is None else rows[:, columns], center
        self._model = site.model if isinstance(site.model, RecordModel) else model_of(site.potential)
        # Rounding makes the sensitivity, and hence the excess rate, at most a tenth larger.
        if isinstance(self._model, RecordModel):
            known = file_change(self._model, self.budget, self._rows)
            excess = 1.1 * self.budget.excess_for(known, opening.private_sites)
            self.rounding: Limits = file_limits(self._model, self.budget, self._rows, known, excess)
        else:
            terms = (self._model, self.budget.bounds, self.budget.neighbours)
            known = sensitivity(*terms, self._rows)
            excess = 1.1 * self.budget.excess_for(known, opening.private_sites)
            self.rounding = limits(*terms, self._rows, center, known, excess)
        self.excess = self.budget.excess_for(self.rounding.sensitivity, opening.private_sites)
        # Norms of the control variate's whitened Hessian and of its slope at the centre.
        control = whitened_control(site, opening)
        parts = () if control is None else (control.precision, control.linear)
        self._control = tuple(float(np.linalg.norm(np.asarray(x))) for x in parts) or (0.0, 0.0)

    @property
    def dim(self) -> int:
        """Whitened coordinates that the site is sent."""
        return self._rows.shape[1]

    @property
    def region(self) -> np.ndarray | None:
        """The region of the site's own parameters."""
        dim = self._rows.shape[0]
        declared = self.budget.bounds.sizes("region", dim)
        if isinstance(self._model, Model) and self._model.loss == "cox":
            return np.minimum(COX_REGION, np.full(dim, COX_REGION) if declared is None else declared)
        return declared

    def check_shape(self, plan: PlanArrays) -> None:
        """Refuse arrays that are not a plan of these dynamics."""
        numbers = (plan.start, plan.duration, plan.velocity)
        finite = all(np.max(np.abs(x), initial=0.0) <= LARGEST for x in numbers)
        if not finite or np.any(plan.duration < 0) or np.any(plan.number < 0) or plan.start.shape[1] != self.dim:
            raise PlanRefused(f"site {self.site.name!r}: not a valid plan (code BAD_PLAN).")
        if self.dynamics.unit_speed and np.any(np.abs(plan.velocity[plan.duration > 0]) != 1.0):
            raise PlanRefused(f"site {self.site.name!r}: a velocity is neither −1 nor 1 (code BAD_SPEED).")

    def check_path(self, plan: PlanArrays, starts: np.ndarray) -> int:
        """Refuse paths that the guarantee does not cover; returns a limit on the passes of a walk along this one.

        ``starts`` are the positions at which segments start, of shape (C, S, d).
        """
        where = self._parameters(plan, starts)
        if (region := self.region) is not None and not np.all(where <= region):
            raise PlanRefused(
                f"site {self.site.name!r}: the path leaves the region for which its sensitivity was declared (code REGION). "
                "Declare a wider one, or start nearer to the posterior."
            )
        walked, rotating, rounding = (plan.duration > 0)[..., None], self.dynamics.flow.rotating, self.rounding
        a, v = np.where(walked, starts, 0.0), np.where(walked, plan.velocity, 0.0)
        reached = np.abs(a) + np.abs(v) * plan.duration[..., None]
        reached = np.minimum(reached, np.hypot(a, v)) if rotating else reached
        farthest = np.linalg.norm(reached, axis=-1).max(1, initial=0.0)
        speed = np.linalg.norm(v, axis=-1).max(1, initial=0.0)
        curvature, slope = self._control
        steepest = curvature * farthest + slope
        near = np.all(farthest <= rounding.distance) and np.all(steepest <= rounding.slope)
        if not (near and np.all(speed <= FASTEST)):
            raise PlanRefused(
                f"site {self.site.name!r}: the plan goes further from the centre than 64-bit arithmetic allows "
                f"(code PLAN_TOO_FAR: at most {rounding.distance:g} whitened units). Start nearer to the posterior."
            )
        control = (curvature, float(np.max(steepest, initial=0.0)))
        excess = (self.excess, rounding.rounding)
        if isinstance(self._model, RecordModel):
            steep = (0.0, 0.0, 0.0, 0.0)
            excess = (self.excess + 2 * file_ceiling(self._model, self.budget, self._rows), rounding.rounding)
        else:
            steep = steepness(self._model, self.budget.bounds, self.budget.neighbours, self._rows, where)
        work = cells(steep, self.dim, rotating, excess, control, farthest, speed, plan.duration.sum(1))
        if not np.all(work <= MOST_CELLS):
            raise PlanRefused(
                f"site {self.site.name!r}: the plan may take {np.max(work):.3g} steps to walk (code TOO_MUCH_WORK: at most "
                f"{MOST_CELLS:g}). Plan less far ahead, start nearer to the posterior, or declare tighter bounds and fewer "
                "most_records."
            )
        return most_passes(float(np.max(work, initial=0.0)), self.dim, plan.duration.shape[1])

    def _parameters(self, plan: PlanArrays, starts: np.ndarray) -> np.ndarray:
        """A bound on the size of each of the site's own parameters along the plan."""
        duration, center = plan.duration[..., None], self._center
        x, speed = starts @ self._rows.T, plan.velocity @ self._rows.T
        if self.dynamics.flow.rotating:
            size = np.hypot(x, speed)
            farthest = np.minimum(np.abs(center) + size, np.abs(center + x) + size * duration)
        else:
            farthest = np.maximum(np.abs(center + x), np.abs(center + x + speed * duration))
        return farthest[plan.duration > 0].max(0, initial=0.0)
