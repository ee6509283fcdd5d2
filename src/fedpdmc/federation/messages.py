"""The messages between coordinator and sites: one class for each kind. `message_format` has their encoding."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fedpdmc.errors import WireError
from fedpdmc.federation.codecs import (
    DIGEST_BYTES,
    Blob,
    Blobs,
    Counts,
    Digest,
    Flags,
    Integers,
    Key,
    Matrix,
    Real,
    RunId,
    Stack,
    Text,
    Vector,
    VectorOrMatrix,
    Whole,
    Words,
)
from fedpdmc.federation.message_format import Message, SiteAnswer, SiteRequest, decode, digest, encode, message, since
from fedpdmc.whitening import NUMBERS

QUARTER = math.pi / 2
# The encoding is used through this module too.
__all__ = ["Message", "SiteAnswer", "SiteRequest", "decode", "digest", "encode"]

NOTHING_ASKED = bytes(DIGEST_BYTES)
# ``remaining`` without a privacy budget, and the length of ``account`` with one.
NO_BUDGET, ACCOUNT = -1.0, 14


def _check_noise(noise: np.ndarray) -> None:
    """Check the report of noise: two standard deviations and an account, or nothing."""
    if len(noise) not in (0, 2 + ACCOUNT) or (noise < 0).any():
        raise WireError("noise", f"{len(noise)} numbers")


def _check_bend(bend: np.ndarray) -> None:
    """Check that there are six numbers for each bent coordinate, or none at all."""
    if bend.shape != (0, 0) and (bend.shape[0] != NUMBERS or not bend.shape[1]):
        raise WireError("bend", f"shape {bend.shape}")


def _nothing() -> np.ndarray:
    return np.zeros((0, 0))


@message(1)
class Hello(Message):
    """Site → coordinator, first: the site's name, the hash of its approved contract, and a random nonce."""

    site: Text
    study: Digest
    software: Text
    nonce: Digest = bytes(DIGEST_BYTES)


@message(2)
class Welcome(Message):
    """Coordinator → site: the id of the run, and a signature of it and the site's nonce.

    With the certificate the site itself can check whether it was revoked, which gRPC does not do.
    """

    run: RunId
    study: Digest
    certificate: Blob = b""
    signature: Blob = b""

    @staticmethod
    def proof(run: bytes, hello: Hello) -> bytes:
        """The bytes that are signed."""
        return b"fedpdmc welcome" + run + hello.study + hello.nonce + hello.site.encode()


@message(3)
class Derive(SiteRequest):
    """Coordinator → site: compute value, gradient and Hessian at a point, for the reference.

    With a spread S that is not empty, their means over ``N(x, S Sᵀ)``. With a bend, numbers of shape (6, r), of the function
    of coordinates in which the log spreads of effects are bent (`fedpdmc.whitening`): x is a point before the bend.
    """

    x: Vector
    spread: Matrix = dataclasses.field(default_factory=_nothing)
    bend: Matrix = dataclasses.field(default_factory=_nothing)

    @property
    def about(self) -> np.ndarray | None:
        """The spread, None if it is empty."""
        return self.spread if self.spread.size else None

    def check(self):
        """A spread of the point's size, or none; six numbers for each bent coordinate, or none."""
        _check_bend(self.bend)
        if self.spread.shape not in ((0, 0), 2 * self.x.shape):
            raise WireError("spread", f"shape {self.spread.shape} at a point of shape {self.x.shape}")


@message(4)
class Derivatives(SiteAnswer):
    """Site → coordinator: the answer to `Derive`.

    ``noise`` is empty without a budget, else the standard deviations of the noise of gradient and Hessian, and the numbers
    of an `AccountStatus`.
    """

    value: Real
    gradient: Vector
    hessian: Matrix
    noise: Vector = dataclasses.field(default_factory=lambda: np.zeros(0))

    def check(self):
        """A square Hessian of the gradient's size; noise and an account of non-negative numbers, or none."""
        if self.hessian.shape != 2 * self.gradient.shape:
            raise WireError("hessian", f"shape {self.hessian.shape} with a gradient of shape {self.gradient.shape}")
        _check_noise(self.noise)


@message(5)
class Open(SiteRequest):
    """Coordinator → site: the whitened coordinates and the site's control variate for the rest of the run.

    Order 0: no control variate. A point without precision and linear part: the site's own Taylor polynomial at this point.
    ``turns`` is the public key of the velocities at turns, two words; empty for dynamics without turns. ``kept`` is the part
    of the released curvature that a control variate of second order has, and ``bend`` that of the last `Derive`. ``wide``
    has columns w: every site takes an equal share of ``w wᵀ``, about the centre, off the curvature of its control variate.
    Where sites make the plans (`joint_plans`): the hash of the coordinator's seed, and the process time of the starts.
    """

    chains: Whole
    segments: Whole
    center: Vector
    scale: VectorOrMatrix
    order: Whole
    precision: Matrix
    linear: Vector
    point: Vector
    turns: Counts = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint32))
    kept: Real = 1.0
    bend: Matrix = dataclasses.field(default_factory=_nothing)
    wide: Matrix = since(9, default_factory=_nothing)
    commitment: Digest = since(10, default_factory=lambda: NOTHING_ASKED)
    begin: Real = since(10, default_factory=lambda: 0.0)

    def check(self):
        """Shapes of one dimension; a control variate of that dimension or an empty one; a key or none; a bend or none."""
        _check_bend(self.bend)
        dim = self.center.shape[0]
        if len(self.turns) not in (0, 2):
            raise WireError("turns", f"a key of {len(self.turns)} words")
        if self.scale.shape not in ((dim,), (dim, dim)):
            raise WireError("scale", f"shape {self.scale.shape} for {dim} parameters")
        if self.order > 2:
            raise WireError("order", str(self.order))
        if self.wide.size and (self.order != 2 or self.wide.shape[0] != dim):
            raise WireError("wide", f"shape {self.wide.shape} for {dim} parameters and order {self.order}")
        if not 0 < self.kept <= 1:
            raise WireError("kept", f"{self.kept:g} of a curvature")
        size = self.linear.shape[0]
        known = size in ((0, dim) if self.order else (0,)) and self.precision.shape == (size, size)
        if not known or self.point.shape != (dim if self.order else 0,):
            raise WireError("control", f"shapes that do not fit {dim} parameters and order {self.order}")


@message(6)
class Opened(SiteAnswer):
    """Site → coordinator: done. With a privacy budget: the observed time that remains, and the account.

    ``account`` is empty without a budget, else the numbers of an `AccountStatus`. Where sites make the plans: the hash of
    the site's seed, and the key with which it signs arrivals; both signed with that of its certificate, if it has one.
    """

    remaining: Real = NO_BUDGET
    account: Vector = dataclasses.field(default_factory=lambda: np.zeros(0))
    commitment: Digest = since(10, default_factory=lambda: NOTHING_ASKED)
    public: Key = since(10, default_factory=lambda: NOTHING_ASKED)
    certificate: Blob = since(10, default_factory=lambda: b"")
    signature: Blob = since(10, default_factory=lambda: b"")

    def check(self):
        """With a budget, an account of non-negative numbers."""
        if len(self.account) != (ACCOUNT if self.remaining >= 0 else 0) or (self.account < 0).any():
            raise WireError("account", f"{len(self.account)} numbers")


def _check_rows(chain: np.ndarray, time: np.ndarray) -> None:
    """Check that the chains of plans are in order, and that there is a time for each plan or for none."""
    if len(time) not in (0, len(chain)):
        raise WireError("time", f"{len(time)} times of {len(chain)} plans")
    if len(chain) and (chain[0] < 0 or np.count_nonzero(chain[1:] <= chain[:-1])):
        raise WireError("chain", "chains that are not in increasing order")


@message(7)
class Plans(SiteRequest):
    """Coordinator → site: the plans of one round, for those chains that the site is asked about.

    Row k is the plan of chain ``chain[k]``. All rows have as many segments as the longest plan needs. ``time`` is the
    process time at which each begins, for studies whose sites have private latents; empty in others. ``until`` is the end
    of the block. ``evidence`` is what plans follow from, where sites make them (`joint_plans`): the seeds of all parties in
    the first request, and then the signed arrivals of all sites along the last plans.
    """

    number: Integers
    start: Matrix
    duration: Matrix
    velocity: Stack
    chain: Integers
    time: Vector = dataclasses.field(default_factory=lambda: np.zeros(0))
    until: Real = since(10, default_factory=lambda: 0.0)
    evidence: Blobs = since(10, default_factory=lambda: ())

    def check(self):
        """Shapes (C,), (C, d), (C, S), (C, S, d), (C,); chains in order; non-negative numbers and durations."""
        (chains, dim), segments = self.start.shape, self.duration.shape[1]
        if not self.number.shape == self.chain.shape == self.duration.shape[:1] == (chains,):
            raise WireError("plan", "arrays with different numbers of chains")
        _check_rows(self.chain, self.time)
        if self.velocity.shape != (chains, segments, dim):
            raise WireError("velocity", f"shape {self.velocity.shape} for {(chains, segments, dim)}")
        if np.count_nonzero(self.number < 0):
            raise WireError("number", "a negative plan number")
        if np.count_nonzero(self.duration < 0):
            raise WireError("duration", "a negative duration")


@message(18)
class TurnPlans(SiteRequest):
    """Coordinator → site: `Plans` whose segments end in turns, which the site computes itself (`turn_plans`).

    ``velocity`` is that of the first segment, ``wait`` the time to the first turn, ``turn`` its number, ``left`` the time to
    the horizon. ``derived`` is a hash of the plans as the coordinator has them, and the rest as in `Plans`.
    """

    number: Counts
    turn: Counts
    chain: Counts
    start: Matrix
    velocity: Matrix
    wait: Vector
    left: Vector
    derived: Digest
    time: Vector = dataclasses.field(default_factory=lambda: np.zeros(0))
    until: Real = since(10, default_factory=lambda: 0.0)
    evidence: Blobs = since(10, default_factory=lambda: ())

    def check(self):
        """One row for each chain; chains in order; positive waits, at most a quarter period; no negative times."""
        rows = self.start.shape[0]
        vectors = (self.number, self.turn, self.chain, self.wait, self.left)
        if any(len(vector) != rows for vector in vectors) or self.velocity.shape != self.start.shape:
            raise WireError("plan", "arrays with different numbers of chains")
        _check_rows(self.chain, self.time)
        if np.count_nonzero((self.wait <= 0) | (self.wait > QUARTER)):
            raise WireError("wait", "a turn that is not within a quarter period")
        if np.count_nonzero(self.left < 0):
            raise WireError("left", "a negative time")


@message(8)
class Arrivals(SiteAnswer):
    """Site → coordinator: for each chain whether there was an arrival; the time of each arrival and its mark.

    A mark is a coordinate, or the velocity after the event. A site with a privacy budget has a time and a mark for every
    chain, so that the size of its answer reveals nothing; other sites send them for arrivals only.

    ``remaining`` is the observed time that a privacy budget still covers, ``observed`` that of this run, and ``spent`` the
    share of the account that all studies have spent. ``passes`` counts the site's passes over its records in this run, if
    the contract allows it.
    """

    time: Vector
    rang: Flags
    coordinate: Integers
    velocity: Matrix
    remaining: Real = NO_BUDGET
    observed: Real = 0.0
    spent: Real = 0.0
    passes: Whole = 0
    signature: Blob = since(10, default_factory=lambda: b"")

    @classmethod
    def of_chains(cls, run, sequence, request, time, rang, mark, *account, **passes) -> Arrivals:
        """From times and marks of all chains, (C,) or (C, d): those without an arrival are left out."""
        came = np.asarray(rang, bool)
        coordinate, velocity = (mark[came], np.zeros((0, 0))) if mark.ndim == 1 else (np.zeros(0, int), mark[came])
        return cls(run, sequence, request, time[came], came, coordinate, velocity, *account, **passes)

    def observed_times(self, horizon: np.ndarray) -> np.ndarray:
        """How long each chain was observed: to its arrival, or to the horizon."""
        times = np.array(horizon)
        times[self.rang.astype(bool)] = np.minimum(self.arrivals()[0], times[self.rang.astype(bool)])
        return times

    def arrivals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times, coordinates and velocities of the arrivals alone; coordinates or velocities are empty."""
        rows = self.rang.astype(bool) if len(self.time) == len(self.rang) else slice(None)
        coordinate, velocity = (mark[rows] if len(mark) else mark for mark in (self.coordinate, self.velocity))
        return self.time[rows], coordinate, velocity

    def check(self):
        """One time and one coordinate or velocity for every arrival, or for every chain; no negative times and amounts."""
        count = len(self.time)
        if count not in (np.count_nonzero(self.rang), len(self.rang)):
            raise WireError("rang", "a different number of chains")
        marks = (self.coordinate.shape[0], self.velocity.shape[0])
        if marks not in ((count, 0), (0, count)):
            raise WireError("mark", f"{marks} coordinates and velocities for {count} times")
        if np.count_nonzero(self.time < 0):
            raise WireError("time", "a negative time")
        if self.observed < 0 or self.spent < 0:
            raise WireError("account", "a negative amount")


@message(9)
class Refusal(SiteAnswer):
    """Either way: refused, with a code. ``chain`` counts from one; zero: no particular chain."""

    code: Text
    chain: Whole


@message(10)
class Farewell(SiteRequest):
    """Coordinator → site: the run has ended."""


@message(11)
class Offer(SiteRequest):
    """Coordinator → site: send a public key for secure sums."""


@message(12)
class Offered(SiteAnswer):
    """Site → coordinator: its X25519 key, signed with the key of its certificate."""

    public: Key
    certificate: Blob
    signature: Blob


@message(13)
class Agree(SiteRequest):
    """Coordinator → site: the `Offered` messages of all sites, unchanged, in the order of the contract."""

    offers: Blobs


@message(14)
class Masked(SiteAnswer):
    """Site → coordinator: the answer to `Derive`, under masks that cancel in the sum over all sites.

    ``noise`` is empty without a budget, else the standard deviations of the site's shares of the noise of gradient and
    Hessian, and the numbers of an `AccountStatus`.
    """

    words: Words
    noise: Vector = dataclasses.field(default_factory=lambda: np.zeros(0))

    def check(self):
        """Noise and an account of non-negative numbers, or none."""
        _check_noise(self.noise)


@message(15)
class Attest(SiteRequest):
    """Coordinator → site: sign the current hash of your log. Carries the coordinator's signature of the previous seal.

    It is not part of the sequence. Zero entries: there is no previous seal.
    """

    entries: Whole
    seal: Digest
    certificate: Blob
    signature: Blob


@message(16)
class Attested(SiteAnswer):
    """Site → coordinator: the number of entries in its log and their hash, signed with the key of its certificate."""

    entries: Whole
    seal: Digest
    certificate: Blob
    signature: Blob


@message(17)
class Checked(Message):
    """Coordinator → site that runs ``--check``: it would be admitted. The clock, in seconds since 1970, and the software."""

    clock: Real
    software: Text


@message(19)
class Reveal(SiteRequest):
    """Coordinator → site: the `Opened` messages of all sites, unchanged, in the order of the contract."""

    openings: Blobs


@message(20)
class Revealed(SiteAnswer):
    """Site → coordinator: the seed whose hash it has sent before."""

    seed: Digest


@message(30)
class AskAccount(SiteRequest):
    """Coordinator → site: how much information have your answers in this study carried? Not part of the sequence."""


@message(31)
class Accounted(SiteAnswer):
    """Site → coordinator: bits, rounded up to a multiple that is public; zero under a privacy budget."""

    bits: Real

    def check(self):
        """No negative number."""
        if self.bits < 0:
            raise WireError("bits", "a negative amount")
