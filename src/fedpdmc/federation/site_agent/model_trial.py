"""The trial of a model file at a site, in a process of its own that does not have the site's records.

The attacker is the author of the file. Whether a site takes part must not depend on its records: the answer would be a
release that nothing controls. So the file is judged by the contract's declared ranges: it must be continuous whatever the
records are, and a narrow part of a column's range must not carry what releases and events reveal about a parameter.
Tracing and proving may take any time: the process has limits of time and memory.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc.dynamics import Line, Rotation
from fedpdmc.enclosures import Interval, continuity, enclose
from fedpdmc.errors import FedPDMCError, InputError, RequestRefused
from fedpdmc.federation.dry_run import records_of
from fedpdmc.federation.site_agent.derivative_disclosure import ModelDisclosure, ReleasePlace, grid
from fedpdmc.models.model_file.records import CONSTANTS, DESIGN
from fedpdmc.potentials.base import public_points
from fedpdmc.study import Policy, Study, parse_study

MOST_SECONDS = 60  # of work that a trial may take
MOST_BYTES = 16 * 2**30  # of address space that a trial may take
PARTS = 64  # into which a column's range is cut
MOST_SHARE = 0.75  # of one of these parts
POINTS = 4  # public points of the parameters
TIMES = 5  # public records for each of a policy's least_records, as many as a site should have
CUT = 2  # pieces of each part that are enclosed at a time
OTHERS = 3  # public records whose other columns are taken
PIECE = 0.2  # first length of a piece of a plan that is checked
HALVINGS = 8  # of such a piece, at most
TOGETHER = 256  # pieces that are checked together
EFFECT = 2.0  # how far the points are from the prior's mean, in the effect of a column on a predictor


def try_model_file(study: Study, site: str, policy: Policy) -> None:
    """Refuse a contract's model file that takes too long to read, may jump, or could single out a record."""
    if not study.model.file:
        return
    given = pickle.dumps((study.text, study.model.model.text, site, policy, MOST_SECONDS, MOST_BYTES))
    words, found = [sys.executable, "-W", "ignore", "-m", __name__], None
    # A driver of a GPU reserves more address space than the limit.
    options: Any = {"env": os.environ | {"JAX_PLATFORMS": "cpu"}, "timeout": 4 * MOST_SECONDS, "check": False}
    try:
        done = subprocess.run(words, input=given, capture_output=True, **options)
        found = done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
        why = (done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"])[-1][:200]
    except subprocess.TimeoutExpired:
        why = "it was ended"
    if found is None:
        limits = (
            f"what takes more than {MOST_SECONDS} s of work or {MOST_BYTES >> 30} GiB to be traced and proved ({why})"
        )
        raise InputError("model file", limits, "Give a smaller model: fewer operations, less deeply nested.")
    if found:
        raise InputError("model file", found, "Read it (fedpdmc model show), and ask its author.")


def judge(study: Study, site: str, policy: Policy) -> str:
    """What is wrong with a contract's model file, by public facts alone; empty if nothing is."""
    dim = len(study.names)
    mean, scale = study.prior_place or (np.zeros(dim), np.ones(dim))
    reach = np.minimum(scale, EFFECT / np.maximum(np.ones(dim) if study.reach is None else study.reach, 1e-300))
    try:
        model: Any = public_model(study, site, max(PARTS, TIMES * policy.least_records))
        potential: Any = model.sized(dim, site) if study.effects is None else model
        potential.check_continuity()
        if study.epsilon is not None or study.effects is not None:
            return ""
        ModelDisclosure(study, model, policy).check_start()
        points = mean + reach * np.random.default_rng(1).uniform(-1, 1, (POINTS, dim))
        return RangeShares(study, site).find_at(points)
    except FedPDMCError as error:
        return str(error)


def public_model(study: Study, site: str, records: int) -> Any:
    """The contract's model with synthetic records of the declared ranges."""
    with tempfile.TemporaryDirectory(prefix="fedpdmc-trial-") as folder:
        return study.potential(records_of(study, site, records, Path(folder)), site)


class RangeShares:
    """Finds parts of a column's declared range that carry what releases and events reveal, from public facts alone.

    An enclosure of the gradient over a part and over a box of parameters bounds what any value there contributes, of records
    whose other columns are public. It is compared with the sum over all parts of a lower bound of what every value there
    contributes, with the same other columns. A site checks the places of releases, and all plans before it answers: piece by
    piece, so that there is no place between the points at which a file is tried. Plans are public: a refusal tells nothing.
    """

    def __init__(self, study: Study, site: str):
        model, ranges, design = (
            public_model(study, site, PARTS),
            study.model.declared(study.columns),
            study.model.design,
        )
        terms = () if design is None else design.names
        parts: list[Any] = (
            [] if study.model.group else [(name, None, *ends) for name, ends in ranges["columns"].items()]
        )
        parts += [(DESIGN, j, -ranges["box"][j], ranges["box"][j]) for j in range(len(terms))]
        self._names = [name if j is None else terms[j] for name, j, *_ in parts]
        self._study, self._site = study, site
        gradient, hessian = (
            jax.vmap(partial(_enclosed, model, parts, derive))
            for derive in (jax.jacfwd, lambda f: jax.jacfwd(jax.jacfwd(f)))
        )
        self._along, self._at = jax.jit(gradient), {"gradient": once(gradient), "Hessian": once(hessian)}

    def find_at(self, points: np.ndarray) -> str:
        """The narrow part that has too large a share of the gradient at one of these points; empty if there is none."""
        return next(filter(None, (self._find("gradient", x[None], np.ones(1)) for x in points)), "")

    def _find(self, of: str, nodes: np.ndarray, weights: np.ndarray) -> str:
        if not self._names:
            return ""
        largest, total = (np.tensordot(weights, np.asarray(x), 1) for x in self._at[of](nodes, nodes))
        if largest.ndim == 3:
            # Rounding hides what is below its size.
            size = np.sqrt(np.diagonal(total, axis1=1, axis2=2))
            total = np.maximum(total, grid(size.shape[1]) * size[:, :, None] * size[:, None, :])
        found = _shares(largest, total)
        if found.max() <= MOST_SHARE:
            return ""
        column, *_, name = np.unravel_index(int(np.argmax(found)), found.shape)
        part = f"one part in {PARTS} of the range of {self._names[column]!r} may have a share of"
        return f"{part} {found.max():.3g} of the {of} by {self._study.names[int(name)]!r}: it may be a person"

    def check_release(self, place: ReleasePlace) -> None:
        """Raise `RequestRefused` for a point, or a Gaussian, at which a narrow part has too large a share."""
        nodes, weights = np.zeros((1, len(place.x))), np.ones(1)
        if place.spread is not None:
            nodes, weights = (np.asarray(x) for x in public_points(len(place.x)))
            nodes = nodes @ place.spread.T
        for of in self._at:
            if found := self._find(of, place.x + nodes, weights):
                raise RequestRefused("NARROW_PART", found)

    def check_plans(self, plans: Any, center: np.ndarray, scale: np.ndarray, rotating: bool) -> None:
        """Raise `RequestRefused` if a narrow part may have too large a share anywhere along plans.

        About the middle m of a piece of half-length h no coordinate of ``x = c + S (a cos t + v sin t)`` is further than
        ``h √((S a)² + (S v)²)`` from ``x(m)``, and on lines ``h |S v|``. Pieces that are not proved are halved.
        """
        if not self._names:
            return
        root, a, pieces = scale if scale.ndim == 2 else np.diag(scale), plans.start, []
        flow = Rotation() if rotating else Line()
        for velocity, duration in zip(np.moveaxis(plans.velocity, 1, 0), plans.duration.T, strict=True):
            for one, other, length in zip(a @ root.T, velocity @ root.T, duration, strict=True):
                count = int(np.ceil(length / PIECE))
                pieces += [(one, other, length * (k + 0.5) / count, 0.5 * length / count) for k in range(count)]
            a, _ = flow.move(a, velocity, duration)
        for _ in range(HALVINGS + 1):
            left = []
            for begin in range(0, len(pieces), TOGETHER):
                a, v, t, h = (np.array(x) for x in zip(*pieces[begin : begin + TOGETHER], strict=True))
                middle = center + flow.move(a, v, t)[0]
                wide = h[:, None] * (np.hypot(a, v) if rotating else np.abs(v))
                padding = ((0, TOGETHER - len(t)), (0, 0))
                low, high = (np.pad(middle + sign * wide, padding, "edge") for sign in (-1, 1))
                found = _shares(*map(np.asarray, self._along(low, high)))[: len(t)]
                left += [pieces[begin + k] for k in np.flatnonzero(found.max((1, 2), initial=0.0) > MOST_SHARE)]
            pieces = [(a, v, t + side * h / 2, h / 2) for a, v, t, h in left for side in (-1, 1)]
            if not pieces:
                return
        raise RequestRefused("NARROW_PART", f"a plan on which one part in {PARTS} of a column's range may be a person")


def _shares(largest: np.ndarray, total: np.ndarray) -> np.ndarray:
    return np.nan_to_num(largest / np.maximum(largest + total, 1e-300), nan=1.0)


def _enclosed(model: Any, parts: list[Any], derive: Any, low, high):
    """For each column, over a box, of public records: the largest contribution of any part, and the sum of the least."""
    box, found, rows = Interval(low, high), [], np.repeat(np.arange(OTHERS), PARTS)
    data = {key: value if key == CONSTANTS else value[rows] for key, value in model.data.items()}
    for name, j, least, most in parts:
        edges = jnp.linspace(least, most, PARTS * CUT + 1)

        def derivatives(column, x, name=name, j=j):
            column = jnp.tile(column, OTHERS)
            value = column if j is None else data[name].at[:, j].set(column)
            return derive(lambda y: model.function.terms(y, data | {name: value}))(x)

        def extremes(low, high, derivatives=derivatives):
            some = enclose(derivatives)(Interval(low, high), box)
            if not isinstance(some, Interval):
                return jnp.abs(some), jnp.abs(some)
            return some.magnitude, jnp.maximum(jnp.maximum(some.lo, -some.hi), 0.0)

        largest, total = jax.vmap(extremes)(edges[:-1].reshape(PARTS, CUT).T, edges[1:].reshape(PARTS, CUT).T)
        largest, total = (x.reshape(OTHERS, PARTS, *x.shape[1:]) for x in (largest.max(0), total.min(0)))
        found.append((largest.max(1).sum(0), total.sum((0, 1))))
    return tuple(map(jnp.stack, zip(*found, strict=True)))


if __name__ == "__main__":
    import resource

    text, file, name, terms, seconds, size = pickle.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    # Continuous for the public records is not enough: they are not the site's.
    continuity.KNOWN_SIZES = (1,)
    with jax.enable_x64(True):
        print(judge(parse_study(text, lambda _: file.encode()), name, terms))
