"""An envelope of many records: their gradient as a polynomial about the site's own mode, with a proved error."""

from __future__ import annotations

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc.clocks.envelopes.base import CELL_PRICE, Known, PointEnvelope, cell_length, gradient_work, reach_of
from fedpdmc.clocks.envelopes.quadratic_rate_bound import certified
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential, RateBound, records_of
from fedpdmc.potentials.base import Field
from fedpdmc.potentials.linear_predictor import curve_on_line
from fedpdmc.potentials.record_taylor import Expansion, expansion, usual_points

# If the error adds more candidates than this to a cell, the records are used at once.
MOST_ADDED = 0.25
# Points at which the envelope is tried out.
TRIALS = 256


class RecordPolynomial(PointEnvelope):
    """Flips of many records with a loss whose derivatives are bounded (`Expansion`).

    Attributes
    ----------
    cubic : (d, d, d)
        Bounds the curve of the gradient on a line, as in `LinearPredictor`.
    cell : ()
        The usual length of a cell, by which the polynomial's error is judged.
    """

    domain: ClassVar[str] = "a polynomial of the records with a proved error, then the records"
    position_decides: ClassVar[bool] = True

    expansion: Expansion
    cubic: Float[Array, "d d d"]
    cell: Float[Array, ""]

    def known(self, a):
        """The polynomial, from the monomials of the distance from its centre."""
        b = (a - self.expansion.center).T
        error, slip = self.expansion.error(b), self.expansion.slip(b)
        return Known(a, self.expansion.gradient(b).T, (error + slip).T, (b, error, slip))

    def bounded(self, dynamics, known, v):
        """Usable where the error adds few candidates."""
        bound, added = self._bound(dynamics, known, v)
        return bound, added * self.cell <= MOST_ADDED

    def _bound(self, dynamics: Dynamics, known: Known, v) -> tuple[RateBound, Float[Array, " C"]]:
        """The bound, and how much the polynomial's error adds to the rates."""
        a, (b, error, slip) = known.position, known.parts
        slope, curve = self.expansion.slope(b, v.T).T, curve_on_line(self.cubic, v)
        field = Field(known.gradient, slope, curve, jnp.full(a.shape[0], jnp.inf), jnp.max(slip, 0))
        bound, speed = certified(dynamics, field, a, v), jnp.abs(v)
        value, tilt = speed * error.T, speed * self.expansion.slope_error(error, v.T).T
        bound = bound._replace(value=bound.value + value, slope=bound.slope + tilt)
        # Not finite where the bound is not.
        added = jnp.sum(value + speed * slip.T + 0.0 * (bound.value + bound.slope), -1)
        return bound, added

    def cost(self, potential, dynamics):
        """The envelope once for each cell, and the records for undecided candidates and where the envelope is unusable."""
        a, v = (jnp.asarray(x) for x in usual_points(potential, self.expansion.center, TRIALS))
        terms = 2 * self.expansion.terms.size + self.expansion.rest.size + self.cubic.size
        survey = 2 * terms / gradient_work(potential)
        return float(_usual_cost(self, dynamics, a, v, jnp.asarray(survey)))


def record_polynomial(potential: Potential, dynamics: Dynamics) -> RecordPolynomial | None:
    """The envelope about the site's own mode, where it applies."""
    records = records_of(potential)
    if not dynamics.flips or dynamics.flow.rotating or records is None or records.cubic is None:
        return None
    known = expansion(potential)
    if known is None:
        return None
    a, v = (jnp.asarray(x) for x in usual_points(potential, known.center, TRIALS))
    made = RecordPolynomial(known, records.cubic, jnp.ones(()))
    return eqx.tree_at(lambda e: e.cell, made, _usual_cell(made, dynamics, a, v))


@once
def _usual_cell(envelope: RecordPolynomial, dynamics: Dynamics, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    """The median length of a cell."""
    return jnp.median(cell_length(envelope._bound(dynamics, envelope.known(a), v)[0]))


@once
def _usual_cost(envelope: RecordPolynomial, dynamics: Dynamics, a, v, survey: Float[Array, ""]) -> Float[Array, ""]:
    bound, added = envelope._bound(dynamics, envelope.known(a), v)
    cell = cell_length(bound)
    cells = 1 / reach_of(bound.value, bound.slope + 0.5 * bound.curve * cell[:, None], cell)
    useful = added * envelope.cell <= MOST_ADDED
    return jnp.mean(jnp.where(useful, survey * cells + 2 * added, jnp.nanmedian(cells) * (survey + CELL_PRICE)))
