"""Checks of requests against the contract. A request is refused before anything is computed or stored for it."""

from __future__ import annotations

import contextlib
import errno
import logging
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fedpdmc.errors import BudgetSpent, InputError, LedgerError, NotFinite, PrivacyError, Refused, RequestRefused
from fedpdmc.federation import messages
from fedpdmc.federation.messages import MOST_BYTES
from fedpdmc.study.contract import Study
from fedpdmc.whitening import VB, moderate

logger = logging.getLogger("fedpdmc.site")
MOST_SEGMENTS = 4096
# Relative rounding error of the observed time.
ROUNDING = 1e-9
SPEED = 1e-12
CODES = {BudgetSpent: "BUDGET_SPENT", InputError: "NOT_COVERED", LedgerError: "LEDGER", PrivacyError: "PLAN_REFUSED"}
# Refusals of disclosure control. They reveal something too, so they count as points that were released.
DECLINED = ("FEW_RECORDS", "TOO_FAR", "TOO_WIDE")
# Openings that may be refused, each of which counts as a point: by many of them the width of a site's own posterior could be
# measured.
SPARE = 4
FARTHEST = 1e12  # the largest coordinate and speed of a plan


def refuse_if(wrong: object, code: str) -> None:
    """Refuse a request for this reason, if it applies."""
    if wrong:
        raise RequestRefused(code)


def failed_disk(refused: RequestRefused) -> OSError | None:
    """The error that stops a site whose ledger could not be written; None for other refusals.

    Nothing is wrong with the request, so it is not refused: the run waits for the site, which answers after a restart.
    """
    cause: BaseException | None = refused.__cause__
    while cause is not None:
        if isinstance(cause, (OSError, sqlite3.OperationalError)):
            number = getattr(cause, "errno", None) or errno.EIO
            return OSError(number, f"{cause}: the request is not answered")
        cause = cause.__cause__
    return None


@contextlib.contextmanager
def refusing_privacy_errors() -> Iterator[None]:
    """Turn errors of the ledger and the privacy guarantee into refusals. The details go to the site's own log."""
    try:
        yield
    except NotFinite as error:
        raise RequestRefused("NOT_FINITE", chain=error.chain + 1) from error
    except (InputError, PrivacyError, Refused) as error:
        logger.error("%s", error)
        usual = next((code for kind, code in CODES.items() if isinstance(error, kind)), "")
        raise RequestRefused(getattr(error, "code", usual)) from error


@dataclass
class Progress:
    """The progress of a run at a site."""

    summed: bool  # whether derivatives are released as sums only
    unit_speed: bool  # whether velocities are 1 or −1
    agreed: bool = False  # whether the sites have agreed on the masks of the sums
    points: int = 0  # points at which derivatives were released or declined
    shape: tuple[int, int, int] | None = None  # chains, segments and coordinates of plans; None before the opening
    # The smallest unused plan number of each chain.
    next: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    observed_time: float = 0.0


def check(study: Study, message: messages.Message, so_far: Progress, again: bool = False) -> None:
    """Raise `RequestRefused` for a request that the contract does not allow, or not now; ``again``: of a stored release."""
    if message.sequence > study.rounds:  # type: ignore[attr-defined]
        raise RequestRefused("TOO_MANY_ROUNDS")
    if isinstance(message, (messages.Offer, messages.Agree)):
        refuse_if(not so_far.summed, "DERIVATIVES_NOT_ALLOWED")
        refuse_if(so_far.agreed, "ALREADY_AGREED")
    elif isinstance(message, messages.Reveal) and not study.sites_plan:
        raise RequestRefused("NOT_IN_CONTRACT")
    elif isinstance(message, messages.Derive):
        _derive(study, message, so_far, again)
    elif isinstance(message, messages.Open):
        _open(study, message, so_far)
    elif isinstance(message, messages.Plans):
        _plans(study, message, so_far)


def _derive(study: Study, message: messages.Derive, so_far: Progress, again: bool) -> None:
    refuse_if(study.derivatives == "none", "DERIVATIVES_NOT_ALLOWED")
    refuse_if(so_far.shape is not None, "ALREADY_OPEN")
    refuse_if(message.x.shape != (len(study.names),), "WRONG_SHAPE")
    refuse_if(message.about is not None and (study.reference != VB or study.one_shot), "NOT_IN_CONTRACT")
    _bend(study, message.bend)
    refuse_if(not again and so_far.points >= study.most_derivatives, "TOO_MANY_DERIVATIVES")
    refuse_if(so_far.summed and not so_far.agreed, "NOT_AGREED")


def _open(study: Study, message: messages.Open, so_far: Progress) -> None:
    refuse_if(study.one_shot, "NOT_IN_CONTRACT")
    dim, order = len(study.names), {"none": 0, "linear": 1, "quadratic": 2}[study.control]
    refuse_if(so_far.shape is not None, "ALREADY_OPEN")
    refuse_if(so_far.points >= study.most_derivatives + SPARE, "TOO_MANY_DERIVATIVES")
    refuse_if(message.center.shape != (dim,) or message.chains != study.chains, "WRONG_SHAPE")
    refuse_if(len(message.turns) and not study.dynamics().turns, "NOT_IN_CONTRACT")
    _bend(study, message.bend)
    own = bool(order) and not message.linear.size
    refuse_if(message.order != order or own != bool(order and so_far.summed), "NOT_IN_CONTRACT")
    # The site allocates plans of this size: no larger than a message can carry.
    numbers = message.chains * message.segments * (dim + 1)
    refuse_if(not 1 <= message.segments <= MOST_SEGMENTS or 8 * numbers > MOST_BYTES, "NOT_IN_CONTRACT")
    plain = np.array_equal(message.scale, np.ones(dim)) and not message.center.any()
    refuse_if(study.reference == "none" and not plain, "NOT_IN_CONTRACT")
    # The condition number of a dense matrix, or the ratio of entries of a diagonal one.
    size = np.abs(message.scale)
    narrow = message.scale.ndim == 1 and not size.min() > 1e-14 * size.max()
    refuse_if(narrow or message.scale.ndim == 2 and not np.linalg.cond(message.scale) <= 1e14, "SINGULAR_REFERENCE")


def _bend(study: Study, numbers: np.ndarray) -> None:
    """Log spreads of effects may be bent, by a map that increases and is neither too steep nor too flat anywhere."""
    if not numbers.size:
        return
    if study.effects is None or study.reference != VB:
        raise RequestRefused("NOT_IN_CONTRACT")
    refuse_if(numbers.shape[1] != len(study.effects.spreads(len(study.names))), "WRONG_SHAPE")
    refuse_if(not moderate(numbers), "UNUSUAL_BEND")


def _plans(study: Study, message: messages.Plans, so_far: Progress) -> None:
    if so_far.shape is None:
        raise RequestRefused("NOT_OPEN")
    chains, segments, dim = so_far.shape
    chain, (rows, longest, own) = message.chain, message.velocity.shape
    refuse_if(not rows or chain[-1] >= chains or not 0 < longest <= segments or own != dim, "WRONG_SHAPE")
    # A plan number is used once: two plans with the same random numbers would reveal more than two arrivals.
    refuse_if((message.number < so_far.next[chain]).any() or (message.number >= 2**31).any(), "PLAN_NUMBER_USED")
    if so_far.unit_speed:
        used = message.duration > 0
        refuse_if((np.abs(np.abs(message.velocity[used]) - 1) > SPEED).any(), "NOT_UNIT_SPEED")
    # No sampler gets this far out in useful coordinates: this is an error or an attack.
    refuse_if(max(np.max(np.abs(x), initial=0.0) for x in (message.start, message.velocity)) > FARTHEST, "PLAN_TOO_FAR")
    most = study.observed_time * (1 + ROUNDING)
    refuse_if(message.duration.sum() > most, "HORIZON_TOO_LONG")
    refuse_if(so_far.observed_time >= most, "OBSERVED_TIME_SPENT")
