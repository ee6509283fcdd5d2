"""How far ahead a plan reaches."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

# A plan is this many times as long as the mean time between site events so far: e⁻⁴ of plans end without one. It
# starts from the pace of the paper's logistic regression: one event in twenty units of time.
MARGIN, USUAL_EVENTS, USUAL_TIME = 4.0, 1.0, 20.0


def plan_horizon(ran: Float[Array, " C"], site_events: Int[Array, " C"]) -> Float[Array, " C"]:
    """The horizon of a plan of several segments: long enough that most plans end in an event of a site.

    ``H = 4 (t + 20)/(n + 1)`` after n events of sites in t units of the chain's own time: beyond that a site walks, and is
    sent, what will hardly be used. It depends on the chain's own past alone, so it is exact, and it does not depend on the
    other chains of the run.
    """
    return MARGIN * (ran + USUAL_TIME) / (site_events + USUAL_EVENTS)
