"""What a contract lets the coordinator ask: each check refuses a request before anything is done, or kept, of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fedpdmc.errors import BudgetSpent, InputError, LedgerError, NotFinite, PrivacyError
from fedpdmc.federation import messages
from fedpdmc.federation.codecs import MOST_BYTES
from fedpdmc.federation.site_agent.disclosure import Disclosing
from fedpdmc.study.contract import Study

logger = logging.getLogger("fedpdmc.site")
MOST_SEGMENTS = 4096
# A horizon may exceed what is left of the observed time by rounding.
ROUNDING = 1e-9
SPEED = 1e-12
# What disclosure control refuses. That it does tells a little too: these count as points that were asked.
DECLINED = ("FEW_RECORDS", "TOO_FAR")
# Coordinates and speeds beyond which no plan is walked.
FARTHEST = 1e12


class No(Exception):
    """A request that is refused, with its code and, for faults of a walk, the chain."""

    def __init__(self, code: str, chain: int = 0):
        self.code, self.chain = code, chain


@contextlib.contextmanager
def charging() -> Iterator[None]:
    """Refuse in one word what the ledger or the guarantee refuses; the site's own log has the rest."""
    try:
        yield
    except BudgetSpent as error:
        logger.error("%s", error)
        raise No("BUDGET_SPENT") from error
    except NotFinite as error:
        raise No("NOT_FINITE", error.chain + 1) from error
    except InputError as error:
        logger.error("%s", error)
        raise No("NOT_COVERED") from error
    except PrivacyError as error:
        logger.error("%s", error)
        raise No("LEDGER" if isinstance(error, LedgerError) else "PLAN_REFUSED") from error


@contextlib.contextmanager
def declining() -> Iterator[None]:
    """Refuse in one word what disclosure control refuses; the site's own log has the rest."""
    try:
        yield
    except Disclosing as error:
        logger.error("not answered: %s", error)
        raise No(error.code) from error


class Progress(NamedTuple):
    """How far a run has come at a site.

    Attributes
    ----------
    summed : bool
        Whether derivatives are only told as sums.
    agreed : bool
        Whether the sites have agreed on the masks of these.
    points : int
        Points at which derivatives were told, or declined because few records carry them.
    shape : (int, int, int) or None
        Chains, segments and coordinates of plans; None before the opening.
    unit_speed : bool
        Whether velocities are 1 or −1.
    next : (chains,)
        The least plan number of each chain that was not used.
    observed_time : float
    """

    summed: bool
    agreed: bool
    points: int
    shape: tuple[int, int, int] | None
    unit_speed: bool
    next: np.ndarray
    observed_time: float


def check(study: Study, message: messages.Message, so_far: Progress) -> None:
    """Raise `No` for a request that the contract does not allow, or not now."""
    if message.sequence > study.rounds:  # type: ignore[attr-defined]
        raise No("TOO_MANY_ROUNDS")
    if isinstance(message, (messages.Offer, messages.Agree)):
        if not so_far.summed:
            raise No("DERIVATIVES_NOT_ALLOWED")
        if so_far.agreed:
            raise No("ALREADY_AGREED")
    elif isinstance(message, messages.Derive):
        _derive(study, message, so_far)
    elif isinstance(message, messages.Open):
        _open(study, message, so_far)
    elif isinstance(message, messages.Plans):
        _plans(study, message, so_far)


def _derive(study: Study, message: messages.Derive, so_far: Progress) -> None:
    if study.derivatives == "none":
        raise No("DERIVATIVES_NOT_ALLOWED")
    if so_far.shape is not None:
        raise No("ALREADY_OPEN")
    if message.x.shape != (len(study.names),):
        raise No("WRONG_SHAPE")
    if so_far.points >= study.most_derivatives:
        raise No("TOO_MANY_DERIVATIVES")
    if so_far.summed and not so_far.agreed:
        raise No("NOT_AGREED")


def _open(study: Study, message: messages.Open, so_far: Progress) -> None:
    dim, order = len(study.names), {"none": 0, "linear": 1, "quadratic": 2}[study.control]
    if so_far.shape is not None:
        raise No("ALREADY_OPEN")
    if message.center.shape != (dim,) or message.chains != study.chains:
        raise No("WRONG_SHAPE")
    own = bool(order) and not message.linear.size
    if message.order != order or own != bool(order and so_far.summed):
        raise No("NOT_IN_CONTRACT")
    # The site holds plans of the size that is opened: no larger than the largest that a message can bring.
    numbers = message.chains * message.segments * (dim + 1)
    if not 1 <= message.segments <= MOST_SEGMENTS or 8 * numbers > MOST_BYTES:
        raise No("NOT_IN_CONTRACT")
    plain = np.array_equal(message.scale, np.ones(dim)) and not message.center.any()
    if study.reference == "none" and not plain:
        raise No("NOT_IN_CONTRACT")
    # A condition number of a dense matrix; of a diagonal one its smallest and largest entry.
    size = np.abs(message.scale)
    narrow = message.scale.ndim == 1 and not size.min() > 1e-14 * size.max()
    if narrow or message.scale.ndim == 2 and not _condition(message.scale) <= 1e14:
        raise No("SINGULAR_REFERENCE")


def _condition(matrix: np.ndarray) -> float:
    """The condition number; NaN where it cannot be found."""
    try:
        with np.errstate(all="ignore"):
            return float(np.linalg.cond(matrix))
    except np.linalg.LinAlgError:
        return np.nan


def _plans(study: Study, message: messages.Plans, so_far: Progress) -> None:
    if so_far.shape is None:
        raise No("NOT_OPEN")
    chains, segments, dim = so_far.shape
    chain, (rows, longest, own) = message.chain, message.velocity.shape
    if not rows or chain[-1] >= chains or longest > segments or own != dim:
        raise No("WRONG_SHAPE")
    # A number that was used is never used again: two plans under one draw would tell more than two arrivals.
    if (message.number < so_far.next[chain]).any() or (message.number >= 2**31).any():
        raise No("PLAN_NUMBER_USED")
    if so_far.unit_speed:
        used = message.duration > 0
        if (np.abs(np.abs(message.velocity[used]) - 1) > SPEED).any():
            raise No("NOT_UNIT_SPEED")
    # Nothing that is sampled is so far out, in coordinates of any use: a number from a site that lies, or an attack.
    if max(np.max(np.abs(x), initial=0.0) for x in (message.start, message.velocity)) > FARTHEST:
        raise No("PLAN_TOO_FAR")
    most = study.observed_time * (1 + ROUNDING)
    if message.duration.sum() > most:
        raise No("HORIZON_TOO_LONG")
    if so_far.observed_time >= most:
        raise No("OBSERVED_TIME_SPENT")
