"""The reference that matches mean and covariance: Gaussian variational Bayes on averaged gradients and Hessians."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.warnings import warn
from fedpdmc.members.site import Member
from fedpdmc.models.mixture_prior import StandIn
from fedpdmc.results.verdict import NARROW
from fedpdmc.sampling.bent_spreads import AWAY, bendable, bending
from fedpdmc.sampling.laplace_reference import Search, begin_search, noisy_laplace
from fedpdmc.sampling.mode_search import Mode, Point, positive_definite, root_of_inverse
from fedpdmc.whitening import LAPLACE, VB, Bend, Reference, Starts

# Averages replace the search for the mode when its next step is shorter than this many standard deviations. An averaged
# round is a Newton round too. Logistic regressions of 1,000 to 20,000 records and 6 to 100 parameters then take 3 to 8
# rounds in all, where the mode to three digits takes 5 to 8.
BEGIN_AVERAGING = 3.0
# The same for the profile of a log spread, which is made about the mode.
BEGIN_PROFILE = 0.3
# Another averaged round is made while the remaining move is estimated to be larger than this, in standard deviations of
# the mean and relative to the precision. After a move of one, another round removed a tenth of the events of sites; after
# a move of a half, the effect was too small to measure. If moves shrink by less than a factor `SLOW`, as for half a
# Gaussian, many rounds would be needed.
SETTLED, MOST_AVERAGED, SLOW = 0.5, 5, 0.8
STILL_USABLE = 0.6  # the last move, in the same units, of a search that has not settled and is used all the same
# An average that cannot be used: in some direction the precision is this much below what was assumed, or the mean further
# away than this plus the root of the dimension, in standard deviations.
LEAST_PRECISION, FARTHEST = 0.04, 5.0
# A rise of ``KL(q|π)`` that is more than rounding.
RISE = 1e-3
# Variances of the reference are larger by this multiple of the root mean square s of the remainder's slopes, or this one of
# its square, whichever is less, up to the last. The posterior's own are larger by s²; its tails want more. On logistic
# regressions with 5 to 100 parameters, 3 to 5 % let coordinates and energy mix faster with no more events where s is 0.05 to
# 0.1, and chains leave the tails sooner; 10 % cost events, and 15 % often slow the energy down. With ten thousand records
# s is 0.015, and one half of it costs a tenth more events for nothing. Less than the least is not worth it.
WIDER, WIDER_SQUARED, LEAST_WIDER, MOST_WIDER = 0.6, 12.0, 1e-3, 0.1
# Slopes are judged from a point at least this far from the centre: nearer to it terms of fourth order are larger.
NEAREST = 0.3
TAIL = 4.5  # distance from the centre, in standard deviations, at which tails are measured
SKEWED = 0.15  # change of curvature per standard deviation above which tails are measured
# Standard deviations from the mode to the mean above which they are measured too: at most the first, and for d parameters
# d + 2 times the second. A symmetric tensor of third derivatives with such a trace has a skew of 0.3.
SHIFTED, SHIFTED_EACH = 0.75, 0.05
MOST_DIRECTIONS = 8  # in which tails are measured
MOST_GUESSED = (
    6.0  # the largest ratio that is guessed, below what sites accept: they see derivatives that are not rounded
)
UNSEEN = 2.5  # part of the ratio that the shift from the mode suggests and the change of curvature does not show
TOO_FAR = 18.0  # ratio, as guessed and allowed by the prior, from which that is too little for the usual burn-in
GUESSED = 4.0  # ratio of variances, less one, for each unit of the change of curvature per standard deviation
WORTH_IT = (
    1.5  # the least ratio of variances for which a reference is widened: 1.45 of 200 records and 6 parameters is none
)
LEAST_TAIL = 1.1  # ratio of variances from which the reference is widened in a direction
MOST_TAIL = 9.0  # the largest such ratio
FLATTEST = 100.0  # ratio of a tail that hardly falls
ALIKE = 1.2  # ratio between what two measures of a tail say, above which a third point is asked for
ONE_SIDE = 0.1  # cosine between a direction and the way to the mode above which only the flat side is measured
# Along a tail that is widened, the ridge on which U is least across it is followed to the height `RIDGE` of U, where one
# thousandth of the mass is left; the Gaussian may be `SLACK` higher there. On a log-normal regression with 4 events of 40
# the ridge is curved: straight directions alone left a hundredth of the mass where the posterior is e^4 times the reference.
RIDGE = 7.0  # height of U above the centre, by Laplace's approximation of what is across the ridge
REACHED = 5.5  # height from which a ridge is not followed further
FOLLOWED = 2  # rounds in which ridges are followed
HIGHEST = 12.0  # the largest height at which a point of a ridge is used
SLACK = 1.0  # height of the Gaussian over that of U
FARTHEST_RIDGE = 18.0  # standard deviations, before widening, by which a ridge is followed further
MOST_RIDGE = 4.0  # ratio of variances, after those of straight directions
DECREMENT = 2.0  # height that a Newton step across a ridge may gain and be taken


class Averaged(NamedTuple):
    """Means over ``N(x, S Sᵀ)``, and what they make of it: the next mean, its scale, and how much these moved."""

    point: Point
    spread: np.ndarray
    center: np.ndarray
    scale: np.ndarray
    moved: float
    divergence: float


def vb(
    sites: Sequence[Member],
    prior: Any = None,
    *,
    tolerance: float = 1e-3,
    start: Any = None,
    reach: np.ndarray | None = None,
    names: Sequence[str] | None = None,
    bend: bool = True,
) -> Reference:
    """Gaussian variational reference: the mean and covariance of the posterior, rather than its mode and curvature there.

    The Gaussian ``q = N(m, S Sᵀ)`` nearest to the posterior, in ``KL(q|π)``, has ``E_q ∇U = 0`` and
    ``(S Sᵀ)⁻¹ = E_q ∇²U``. The search begins as `laplace` does. Once a step is short, sites are asked for the means of
    gradient and Hessian over the present q, ``g_m`` and ``H_m``, and the next q has ``P = ΣH_m`` plus the prior's precision,
    ``m' = m − P⁻¹ Σg_m`` and ``S' S'ᵀ = P⁻¹``. One such round is enough for most posteriors.

    The control variates ``g_m·(x − m) + ½ (x − m)ᵀH_m(x − m)`` are those of the last round. With R what they leave to the
    sites, in whitened coordinates, the Hermite expansion of ``∇R`` over q gives ``E|∇R|² = |E∇R|² + |E∇²R|² + …``: the first
    two terms are zero for them, and not for Taylor polynomials at the mode. The target does not depend on control variates,
    so the iteration may stop anywhere.

    Parameters
    ----------
    sites : sequence of Site
    prior : Quadratic or callable, optional
    tolerance : float
        Where averages cannot be used, or the prior is flat: that of `laplace`.
    start, reach, names
        As for `laplace`.
    bend : bool
        Whether log spreads of grouped effects may be bent (`fedpdmc.sampling.bent_spreads`).

    Returns
    -------
    Reference
        With ``name`` "vb", or "laplace" if averages could not be used; ``why`` gives the reason.

    Raises
    ------
    ImproperPosterior, NoMode, ModeNotFound, InputError
        As `laplace` does.
    """
    return search_vb(sites, prior, tolerance, start, reach, names, bend)[0]


@double_precision
def search_vb(
    sites: Sequence[Member],
    prior: Any,
    tolerance: float,
    start: Any,
    reach: np.ndarray | None,
    names: Sequence[str] | None,
    bend: bool = False,
    points: int | None = None,
) -> tuple[Reference, np.ndarray, np.ndarray | None]:
    """`vb`, the last point, and the spread over which derivatives were averaged there, if any.

    ``points`` is how many requests a contract allows, with one more for the last point.
    """
    search = begin_search(sites, prior, start, names)
    if any(site.noisy for site in search.sites):
        return noisy_laplace(search.sites, search.prior, search.start, averaged=True), search.start, None
    # With a flat prior, whether the posterior is proper is judged at the mode, which is then searched to convergence.
    spreads = bendable(search.sites, search.prior) if bend else ()
    begin = max(tolerance, BEGIN_PROFILE if spreads else BEGIN_AVERAGING)
    tolerances, rounds = [tolerance] if search.flat else [begin, tolerance], 0
    for wanted in tolerances:
        mode = search.mode(wanted, reach)
        rounds += mode.rounds
        begins = [(search, mode, None)]
        if spreads and wanted == begin and _may_bend(points, rounds, spreads):
            made = bending(search, mode, spreads)
            rounds += made.rounds
            begins = begins if made.bend is None else [(made.search, made.start, made.bend), *begins]
        for where, start_at, bent in begins:
            # How many averages a contract still allows.
            found, averaged = _average(where, start_at, None if points is None else points - rounds - 1)
            rounds += averaged
            if found is not None:
                return _reference(where, found, mode.point, rounds, averaged, bent, points), found.point.x, found.spread
        search = search._replace(start=mode.point.x)
    here, step, _ = mode
    if points is not None:
        # Control variates are made where sites were asked last, and that was for an average.
        search.ask(here.x)
        rounds += 1
    scale = root_of_inverse(positive_definite(here.hessian))
    why = "averages over the Laplace approximation could not be used, or did not settle"
    return search.reference(here, here.x + step, scale, rounds, LAPLACE, why), here.x, None


def _may_bend(points: int | None, rounds: int, spreads: tuple[int, ...]) -> bool:
    """Whether a contract allows a profile and an average, another one if that cannot be used, and the exact one."""
    needed = rounds + len(spreads) * len(AWAY) + 3
    if points is None or needed <= points:
        return True
    warn(
        f"The search for the reference took {rounds} of the {points} points at which the contract allows derivatives. "
        "The log spreads of the effects are therefore not bent, and probabilities of spreads close to zero converge slowly, "
        f"which no diagnostic shows. Allow at least {needed + MOST_AVERAGED}: [limits] derivatives in the contract, "
        "most_derivatives in the sites' policies."
    )
    return False


def _reference(
    search: Search, found: Averaged, before: Point, rounds: int, averaged: int, bent: Bend | None, points: int | None
) -> Reference:
    """The reference of the last average, made wider as the posterior's tails are; ``before`` is the last point before it."""
    tails, kept = Tails(search, found), 1.0
    moved = f"moved mean or precision by {found.moved:.2g} standard deviations"
    why = (
        f"the last of {averaged} averages {moved}"
        if bent is None
        else f"log spreads are bent; the last average {moved}"
    )
    whole = all(site.coordinates is None for site in search.sites)
    if bent is None and (points is not None or not whole):
        # Sites that see some parameters only have no share in other directions.
        tails.guess(before, whole)
    elif bent is None and tails.skewed(before):
        tails.measure(before)
    elif bent is not None and points is None:
        tails.measure(None)
    if count := tails.wide.shape[1]:
        why += f"; it is wider in {count} direction{'s' * (count > 1)}, as the posterior's tails are"
    elif bent is None:
        kept, words = _part_kept(before, found, _rounding(search, found.scale))
        why += words
    rounds += tails.rounds
    if bent is None or count:
        reference = _wider(search, found.point, rounds, why, kept, tails.wide if count else None)
    else:
        reference = search.reference(found.point, found.center, found.scale, rounds, VB, why)
    starts = None
    if count:
        # Chains start from the Gaussian before it was widened, stretched towards the tails.
        forms, moves = (np.array(part).T for part in zip(*tails.stretch, strict=True))
        starts = Starts(found.scale, forms, moves)
    ridged = tails.straight <= NARROW
    return dataclasses.replace(reference, bend=bent, starts=starts, narrow=tails.narrow, ridged=ridged)


@double_precision
def reference_at(
    sites: Sequence[Member], prior: Any, x: np.ndarray, spread: np.ndarray | None, names: Sequence[str] | None,
    found: Reference,
) -> Reference:  # fmt: skip
    """The reference of one round at a point: of derivatives there, or of their means, as wide as the one that was found."""
    kept = min((own.kept for own in (found.control or {}).values()), default=1.0)
    search = begin_search(sites, prior, x, names).bent(found.bend)
    made = _wider(search, search.ask(x, spread), 1, "", kept, found.wide)
    return dataclasses.replace(
        made, bend=found.bend, starts=found.starts, narrow=found.narrow, ridged=found.ridged, why=found.why
    )


class Tails:
    """Directions in which the posterior's tails are wider than a Gaussian, and that Gaussian made wider.

    Where the Gaussian falls faster than the posterior, ``V = U + log q`` falls outward: chains reach such a tail rarely and
    stay long. With the variance w² along a direction of unit variance, V does not fall beyond t if the slope of U there is
    at least ``t/w²``. So the slope is measured at a distance, and the precision P becomes ``P − W Wᵀ``.

    Attributes
    ----------
    wide : array of shape (d, k)
        W.
    stretch : list
        For each side of a direction that is wider: the linear form that is positive on it, and how far a point that is one
        standard deviation out is moved.
    rounds : int
    """

    # A reference that is not widened, as a negative control of the verdict.
    widens = True

    def __init__(self, search: Search, found: Averaged):
        self.search, self.center = search, found.center
        self.precision, self.rounds = positive_definite(found.point.hessian), 0
        self.first = self.precision
        self.wide, self.stretch = np.zeros((len(found.center), 0)), []
        self.narrow: tuple[int, float] | None = None
        self.straight = 1.0

    def skewed(self, before: Point) -> bool:
        """Whether tails are measured: the curvature changes much from the mean to a point near the mode, or these differ."""
        change, _, distance, (scale, way), _ = self._change(before)
        far = min(SHIFTED, SHIFTED_EACH * (len(way) + 2))
        return bool(np.abs(change).max() >= SKEWED * distance or np.abs(_shift(before, scale, way)).max() >= far)

    def _change(self, before: Point):
        """Eigenvalues and eigenvectors of the change of curvature to a point, its distance, the whitening, the rounding."""
        scale = root_of_inverse(self.precision)
        way = np.linalg.solve(scale, before.x - self.center)
        distance = max(float(np.linalg.norm(way)), NEAREST)
        change, vectors = np.linalg.eigh(scale.T @ before.hessian @ scale - np.eye(len(way)))
        return change, vectors, distance, (scale, way), 2 * np.sqrt(len(way)) * _rounding(self.search, scale)

    def guess(self, before: Point, widen: bool) -> None:
        """Widen as the change of curvature suggests, without a question; or only note it.

        A contract counts the points at which sites are asked, and far out few records contribute. The ratio of variances
        that tails of regressions need is about ``1 + 4 |T[u]|`` along a direction, and no more than the prior allows.
        """
        change, vectors, distance, (scale, way), noise = self._change(before)
        change = np.sign(change) * np.maximum(np.abs(change) - noise, 0.0)
        prior = self.search.prior
        own, widest = np.zeros((len(way), len(way))) if prior is None else np.asarray(prior.precision), 1.0
        shift = _shift(before, scale, way)
        length = max(float(np.linalg.norm(shift)), 1e-300)
        # The skew along the shift of the least tensor of third derivatives with that trace.
        unseen = 6 * max(np.abs(shift).max() - noise, 0.0) / (len(way) + 2)
        found = [
            (abs(float(change[k])) / distance, -np.sign(change[k] * (vectors[:, k] @ way)) or 1.0, vectors[:, k])
            for k in np.argsort(-np.abs(change))[:MOST_DIRECTIONS]
            if abs(change[k]) >= SKEWED * distance
        ]
        if not found and 1 + GUESSED * unseen > UNSEEN:
            found = [(unseen, -1.0, shift / length)]
        for skew, side, e in found:
            wanted = min(1 + GUESSED * skew, 1 / max(float(e @ scale.T @ own @ scale @ e), 1e-300))
            ratio = min(wanted, MOST_GUESSED)
            if ratio < WORTH_IT:
                continue
            if wanted > TOO_FAR:
                self._note(scale @ e, wanted / ratio)
            if not widen or not self.widens:
                self._note(scale @ e, ratio)
            else:
                dual = np.linalg.solve(scale.T, e)
                self._take_off(dual, ratio, 1.0)
                self.stretch.append((side * dual, side * (np.sqrt(ratio) - 1) * (scale @ e)))
            widest = max(widest, ratio)
        if 1 + GUESSED * unseen > UNSEEN * widest:
            self._note(scale @ shift, (1 + GUESSED * unseen) / widest)

    def _take_off(self, dual: np.ndarray, ratio: float, now: float) -> None:
        column = dual * np.sqrt((1 - now / ratio) / now)
        self.wide = np.c_[self.wide, column]
        self.precision = self.precision - np.outer(column, column)

    def _note(self, way: np.ndarray, ratio: float, ridge: bool = False) -> None:
        """Keep the parameter that moves most along the direction with the widest tail."""
        self.straight = self.straight if ridge else max(self.straight, float(ratio))
        if self.narrow is None or ratio > self.narrow[1]:
            self.narrow = int(np.argmax(np.abs(way) * np.sqrt(np.diag(self.precision)))), float(ratio)

    def measure(self, before: Point | None) -> None:
        """Widen as the tails need: of every parameter, and in directions in which the curvature changes up to the mode."""
        ways, of = [], []
        if before is not None:
            ways, of = self._along_change(before)
        covariance = np.linalg.inv(self.precision)
        for i, way in enumerate((covariance / np.sqrt(np.diag(covariance))).T):
            # The others follow as they are correlated.
            ways, of = [*ways, -way, way], [*of, f"parameter {i}", f"parameter {i}"]
        self._widen(ways, of)

    def _along_change(self, before: Point) -> tuple[list[np.ndarray], list[str]]:
        """Eigenvectors of the change of curvature, on the side on which it falls.

        To third order the change is ``T[u]``, with u the way to the mode.
        """
        change, vectors, distance, (scale, way), _ = self._change(before)
        ways, of = [], []
        for k in np.argsort(-np.abs(change))[:MOST_DIRECTIONS]:
            cosine = float(vectors[:, k] @ way) / distance
            side = -np.sign(change[k] * cosine)
            for sign in (side,) if abs(cosine) > ONE_SIDE else (-1.0, 1.0):
                ways.append(sign * (scale @ vectors[:, k]))
                of.append(f"change {k}")
        return ways, of

    def _widen(self, ways: list[np.ndarray], of: list[str]) -> None:
        ratios = [_ratio(slope) for slope in self._slopes(ways)]
        if max(ratios) < WORTH_IT:
            return
        if isinstance(self.search.prior, StandIn):
            # Nothing of the sites' curvature is left where a tail is that of the prior, which has longer ones itself.
            own, linear = np.asarray(self.search.prior.precision), np.asarray(self.search.prior.linear)
            for i, (way, at) in enumerate(zip(ways, self.tops, strict=True)):
                if ALIKE * way @ (own @ at.x + linear) > TAIL / ratios[i]:
                    ratios[i] = max(ratios[i], 1 / float(way @ own @ way))
        for k in dict.fromkeys(of):
            own = [i for i in range(len(of)) if of[i] == k]
            best = max(own, key=lambda i: ratios[i])
            # The variance along the direction, which others may have widened.
            dual = self.first @ ways[best]
            now = float(dual @ np.linalg.solve(self.precision, dual))
            most = MOST_TAIL * float(dual @ np.linalg.solve(self.first, dual))
            if ratios[best] > most:
                self._note(ways[best], ratios[best] / most)
            wanted = min(ratios[best], most)
            if wanted < LEAST_TAIL * now:
                continue
            if not self.widens:
                self._note(ways[best], ratios[best])
                continue
            self._take_off(dual, wanted, now)
            for i in own:
                if min(ratios[i], most) >= LEAST_TAIL * now:
                    more = np.sqrt(min(ratios[i], most) / now) - 1
                    self.stretch.append((self.first @ ways[i], more * ways[i]))
        if self.wide.size:
            self._follow_ridges(ways)

    def _slopes(self, ways: Sequence[np.ndarray]) -> list[float]:
        """Slopes of U along directions, where U is least across them: by a Newton step, and a look whether it was one."""
        at_center, *first = self._ask([self.center, *(self.center + TAIL * way for way in ways)])
        self.lowest, self.tops = at_center, first
        slopes, again = [], {}
        for i, (way, at) in enumerate(zip(ways, first, strict=True)):
            slope, step = self._across(way, at)
            along = float(way @ at.gradient)
            slopes.append(along if np.isnan(slope) else slope)
            if max(_ratio(slope), _ratio(along)) > ALIKE * min(_ratio(slope), _ratio(along)):
                again[i] = at.x + step
        found = self._ask(list(again.values())) if again else []
        for i, at in zip(again, found, strict=True):
            better = np.isfinite(at.value) and at.value < first[i].value
            slopes[i] = self._across(ways[i], at)[0] if better else float(ways[i] @ first[i].gradient)
            if better:
                self.tops[i] = at
        return slopes

    def _follow_ridges(self, ways: Sequence[np.ndarray]) -> None:
        """Widen towards points far out on curved ridges: where the Gaussian is higher than U, V falls on the way to them."""
        # The points of the ridges say better than slopes nearer to the centre what is left.
        self.narrow, self.straight, points, asked = None, 1.0, [], list(zip(ways, self.tops, strict=True))
        for left in reversed(range(FOLLOWED + 1)):
            beyond = []
            for way, at in asked:
                there = self._on_ridge(way, at)
                if there is None:
                    continue
                x, height, tangent, slope, gain = there
                if gain > DECREMENT:
                    # Off the ridge: the point counts with its own height, and the ridge is looked for beside it.
                    points.append((way, at.x, height + gain))
                    if left and height < REACHED:
                        beyond.append((way, x))
                    continue
                points.append((way, x, height))
                if height >= REACHED:
                    continue
                if left and slope > 0:
                    # To second order: along a Gaussian prior's tail U grows faster than its slope says.
                    root = np.sqrt(slope**2 + 2 * max(float(tangent @ at.hessian @ tangent), 0.0) * (RIDGE - height))
                    beyond.append((way, x + min(2 * (RIDGE - height) / (slope + root), FARTHEST_RIDGE) * tangent))
                else:
                    self._note(way, RIDGE / max(height, 1.0))
            if not beyond:
                break
            asked = [(way, at) for (way, _), at in zip(beyond, self._ask([x for _, x in beyond]), strict=True)]
        points = [point for point in points if 1.0 < point[2] < HIGHEST]
        # The one that needs most first: it serves its neighbours too.
        for way, x, height in sorted(points, key=lambda point: self._excess(*point[1:]), reverse=True):
            ratio = self._excess(x, height)
            if ratio < LEAST_TAIL:
                continue
            if ratio > MOST_RIDGE:
                # A ridge, or a corner, that no straight direction has shown: chains are slow to go round it.
                self._note(way, ratio, ridge=True)
            dual = self.precision @ (x - self.center)
            dual /= np.sqrt(dual @ (x - self.center))
            self._take_off(dual, min(ratio, MOST_RIDGE), 1.0)
        for way, x, height in points:
            if self._excess(x, height) > LEAST_TAIL:
                self._note(way, self._excess(x, height))

    def _excess(self, x: np.ndarray, height: float) -> float:
        """The Gaussian's height at a point over that of U."""
        away = x - self.center
        return float(0.5 * away @ self.precision @ away) / (height + SLACK)

    def _on_ridge(self, way: np.ndarray, at: Point) -> tuple[np.ndarray, float, np.ndarray, float, float] | None:
        """The point of a ridge beside the one asked for, its height, direction and slope, and what the Newton step gains."""
        slope, step = self._across(way, at)
        if np.isnan(slope) or not np.isfinite(at.value):
            return None
        gain = -0.5 * float(step @ at.gradient)
        # Laplace's approximation of the marginal density: a ridge that becomes wider has more mass than U says.
        height = at.value - self.lowest.value + self._narrowness(way, at) - self._narrowness(way, self.lowest)
        # To second order the minimum across moves with the direction by what a Newton step takes off `H way`.
        moved = self._across(way, at._replace(gradient=at.hessian @ way))[1]
        return at.x + step, height - gain, way + moved, slope, gain

    def _narrowness(self, way: np.ndarray, at: Point) -> float:
        """Half the log determinant of the curvature across a direction."""
        basis = np.linalg.svd((self.first @ way)[:, None])[0][:, 1:]
        return 0.5 * float(np.linalg.slogdet(positive_definite(basis.T @ at.hessian @ basis))[1]) if basis.size else 0.0

    def _across(self, way: np.ndarray, at: Point) -> tuple[float, np.ndarray]:
        """Slope along a direction after a Newton step across it, and that step."""
        if not (np.all(np.isfinite(at.gradient)) and np.all(np.isfinite(at.hessian))):
            return np.nan, np.zeros_like(way)
        # A basis of what is uncorrelated with the direction: the dual form is zero on it.
        dual = self.first @ way
        basis = np.linalg.svd(dual[:, None])[0][:, 1:]
        if not basis.size:
            return float(way @ at.gradient), np.zeros_like(way)
        inner = positive_definite(basis.T @ at.hessian @ basis)
        move = np.linalg.solve(inner, basis.T @ at.gradient)
        return float(way @ at.gradient - way @ at.hessian @ basis @ move), -basis @ move

    def _ask(self, points: list[np.ndarray]) -> list[Point]:
        self.rounds += 1
        return [self.search.ask(point) for point in points]


def _shift(before: Point, scale: np.ndarray, way: np.ndarray) -> np.ndarray:
    """The way from the mean to the mode, in standard deviations."""
    return way - np.linalg.solve(scale, np.linalg.solve(positive_definite(before.hessian), before.gradient))


def _ratio(slope: float) -> float:
    """The variance that a tail with this slope needs, at least one."""
    if np.isnan(slope):
        return 1.0
    return max(TAIL / slope, 1.0) if slope > TAIL / FLATTEST else FLATTEST


def _wider(search: Search, at: Point, rounds: int, why: str, kept: float, wide: np.ndarray | None = None) -> Reference:
    """The reference of the derivatives at a point, or of their means, whose sites keep this part of their curvature.

    q has smaller variances than the posterior: with the remainder R of the potential in whitened coordinates these are
    ``I + E_q ∇R ∇Rᵀ`` to second order. A rotation brings the energy of q with every turn, and events must make up for the
    rest: a chain in a tail of the posterior that q does not have is kept there by one event after the other. So the
    precision is ``P_0 + κ ΣH_m`` with κ at most one, and the control variates keep κ of their curvature: the reference is
    still the sum of prior and control variates, and the coordinator has no events.
    """
    own = 0.0 if search.prior is None else np.asarray(search.prior.precision)
    precision = positive_definite(kept * at.hessian + (1 - kept) * own)
    center, name = at.x - np.linalg.solve(precision, at.gradient), LAPLACE if at.spread is None else VB
    if wide is not None:
        precision = positive_definite(precision - wide @ wide.T)
    return search.reference(at, center, root_of_inverse(precision), rounds, name, why, kept, wide)


def _rounding(search: Search, scale: np.ndarray) -> float:
    """The standard deviation that the rounding of two Hessians by the sites gives to an entry of their whitened difference.

    An entry is off by up to ``2⁻ᵏ s_i s_j`` with ``s_i² ≈ H_ii``, each of M sites has about a part 1/M of ``s_i s_j``, and
    ``‖Sᵀ s‖²`` is the largest factor by which correlation raises a variance.
    """
    grids = [site.grid for site in search.sites if site.grid > 0]
    if not grids:
        return 0.0
    size = np.sqrt(np.diag(np.linalg.inv(scale @ scale.T)))
    return max(grids) / np.sqrt(6 * len(grids)) * float(np.linalg.norm(size[:, None] * scale, 2)) ** 2


def _part_kept(before: Point, found: Averaged, noise: float = 0.0) -> tuple[float, str]:
    """κ of `_wider`, from the slopes that the search has seen, and what is said about it.

    To third order ``∇²R(a) = T[a]`` and ``E_q |∇R|² = ½ ‖T‖²`` with a symmetric tensor T. ``before`` is the last point of
    the search for the mode. Its Hessian gives ``B = T[u]`` with the unit vector u from the centre to it, and so all entries
    with an index along u: each is in T as often as its indices can be ordered. The mean of the gradient over q differs by
    ``½ (T[δ, δ] + T[I])`` from what the Hessian before says, so that the traces of T are known too. A symmetric tensor of
    k dimensions with traces t has ``‖T‖² ≥ 3 |t|²/(k + 2)``, which stands for the entries across u. No round is needed.
    """
    scale, dim, at = found.scale, len(found.center), found.point
    away = np.linalg.solve(scale, before.x - found.center)
    distance = max(float(np.linalg.norm(away)), NEAREST)
    u, rest = away / distance, (scale.T @ before.hessian @ scale - np.eye(dim)) / distance
    along, moved = rest @ u, np.linalg.solve(scale, at.x - before.x)
    across = rest - np.outer(u, along) - np.outer(along, u) + (u @ along) * np.outer(u, u)
    gap = scale.T @ (at.gradient - before.gradient - before.hessian @ (at.x - before.x))
    traces = 2 * gap + np.linalg.norm(moved) * (rest @ moved) - along
    known = 3 * np.sum(along**2) - 2 * (u @ along) ** 2 + 3 * np.sum(across**2)
    square = known + 3 * np.sum((traces - (u @ traces) * u) ** 2) / (dim + 1)
    square = max(square - 3 * (dim * noise / distance) ** 2, 0.0)
    slope = float(np.sqrt(square / (2 * dim)))
    more = min(WIDER * slope, WIDER_SQUARED * slope**2, MOST_WIDER)
    if not more >= LEAST_WIDER:
        return 1.0, ""
    return 1 / (1 + more), f"; its variances are {100 * more:.2g} % larger"


def _average(search: Search, mode: Mode, most: int | None) -> tuple[Averaged | None, int]:
    """Averaged rounds from a point near the mode, and how many there were; None if they cannot be used.

    ``KL(q|π)`` falls by every round, up to overshooting. Where each moves q by ρ times the one before, ``ρ/(1 − ρ)`` times
    the last is left. A round after which KL has risen is left out. After one that moves q about as far as the last, the next
    goes half the way.
    """
    x, spread = mode.point.x + mode.step, root_of_inverse(positive_definite(mode.point.hessian))
    before, allowed = None, MOST_AVERAGED if most is None else max(min(MOST_AVERAGED, most), 1)
    for made in range(1, allowed + 1):
        now = _next_gaussian(search.ask(x, spread), spread)
        if not np.isfinite(now.divergence) or (before is not None and now.divergence > before.divergence + RISE):
            break
        ratio = 0.0 if before is None else now.moved / before.moved
        left = now.moved if before is None else now.moved * ratio / (1 - ratio) if ratio < SLOW else np.inf
        if left <= SETTLED:
            return now, made
        before, x, spread = now, now.center, now.scale
        if ratio >= SLOW:
            x = (now.point.x + now.center) / 2
            inverse = np.linalg.inv(now.spread)
            spread = root_of_inverse(positive_definite((now.point.hessian + inverse.T @ inverse) / 2))
    # The last average, unless the search is still on its way.
    return (before if before is not None and before.moved <= STILL_USABLE else None), made


def _next_gaussian(point: Point, spread: np.ndarray) -> Averaged:
    """What an averaged round says; with an infinite divergence if it cannot be used."""
    dim, nothing = len(point.x), Averaged(point, spread, point.x, spread, np.inf, np.inf)
    if not (np.isfinite(point.value) and np.all(np.isfinite(point.gradient)) and np.all(np.isfinite(point.hessian))):
        return nothing
    precision = spread.T @ point.hessian @ spread
    values = np.linalg.eigvalsh((precision + precision.T) / 2)
    if values[0] < LEAST_PRECISION:
        return nothing
    step = -np.linalg.solve(precision, spread.T @ point.gradient)
    length = float(np.sqrt(step @ step))
    if length > FARTHEST + np.sqrt(dim):
        return nothing
    scale = root_of_inverse(positive_definite(point.hessian))
    moved = max(length, float(np.sqrt(np.sum((1 / values - 1) ** 2))))
    # Up to a constant: E_q U − log|S|.
    divergence = point.value - float(np.linalg.slogdet(spread)[1])
    return Averaged(point, spread, point.x + spread @ step, scale, moved, divergence)
