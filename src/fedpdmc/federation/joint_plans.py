"""Plans that a site makes by itself: their turns, and all of them where nobody is to choose plans.

*Turns.* The coordinator's own events in a plan with turns are turns only. Their times follow from the time to the first
one, and their velocities from the key in the opening, the chain and the number of the turn (`fedpdmc.dynamics`). A message
has the current state and five numbers of each chain, whatever the length of its plan. It reveals what whole plans reveal:
velocities are public randomness, and only the current state depends on the other sites. Both sides compute the same bits on
every machine, and a hash of the whole plans verifies it. If it differs, the site refuses with the code
``OTHER_VELOCITIES``: it never answers a plan other than the coordinator's.

*Joint plans* are chosen by nobody: sites make them from joint randomness and signed arrivals, and refuse any other.

In the opening every party commits to a seed by its hash, after the coordinator has fixed the reference and all else, and
reveals it when all hashes are known. A hash of all seeds is the seed of the run's public stream: starts, velocities at
turns, refreshments. Each request then has the arrivals of all sites along the last plans, signed together with the hash of
those plans. So a site knows where every chain is, and computes its plan with the coordinator's own functions. It accepts
numbers that differ by rounding, as those of another machine may, and goes on from the coordinator's. The end of a block is
left to the coordinator: it is common to all chains, stays until all have reached it, and only divides the same paths.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import compiled, strong_types
from fedpdmc._jax.random_streams import ChainKeys
from fedpdmc.dynamics import turn_durations, turn_velocities
from fedpdmc.errors import BadAnswer, RequestRefused, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.answer_checks import read_arrival
from fedpdmc.plan import Plan
from fedpdmc.potentials import Quadratic
from fedpdmc.sampling.arguments import public_potential
from fedpdmc.sampling.coordinator import Coordinator, Itinerary, PublicKeys, State
from fedpdmc.sampling.defaults import Method
from fedpdmc.sampling.engines.one_round import finish_round, plan_ahead
from fedpdmc.sampling.factory import coordinator, coordinator_key, start_state
from fedpdmc.study.contract import Study
from fedpdmc.whitening import Reference

Request = messages.Plans | messages.TurnPlans
ROUNDING = 1e-9  # largest difference of numbers that two machines compute, relative to one plus their size


def abbreviated(run: bytes, sequence: int, plans: messages.Plans, plan: Plan) -> messages.TurnPlans:
    """The short form of the plans of a `Plan` with turns."""
    turns, chain = plan.turns, plans.chain
    assert turns is not None
    wait, number, left = (np.asarray(x)[chain] for x in (turns.wait, turns.number, turns.left))
    return messages.TurnPlans(
        run, sequence, plans.number, number, chain, plans.start, plans.velocity[:, 0], wait, left,
        fingerprint(plans.duration, plans.velocity), plans.time, plans.until, plans.evidence,
    )  # fmt: skip


def whole(message: messages.TurnPlans, keys: ChainKeys, segments: int) -> messages.Plans:
    """The plans, of existing chains, from their short form and the keys of the turns (C, 2); their hash is not checked."""
    duration = turn_durations(message.wait, message.left, segments)
    longest = max(int(np.max(np.sum(duration > 0, 1), initial=0)), 1)
    rows, dim = message.start.shape
    velocity = np.empty((rows, longest, dim))
    velocity[:, 0] = message.velocity
    if longest > 1:
        first = np.zeros(len(keys), np.int64)
        first[message.chain] = message.turn
        # Padded to one of a few lengths, because each is compiled.
        count = min(1 << (longest - 2).bit_length(), segments - 1)
        made = np.asarray(_velocities(count, dim)(keys, jnp.asarray(first)))
        velocity[:, 1:] = np.swapaxes(made[: longest - 1, message.chain], 0, 1)
    number, chain = (x.astype(np.int64) for x in (message.number, message.chain))
    rest = message.time, message.until, message.evidence
    return messages.Plans(
        message.run, message.sequence, number, message.start, duration[:, :longest], velocity, chain, *rest
    )


@functools.cache
def _velocities(count: int, dim: int):
    return compiled(functools.partial(turn_velocities, count=count, dim=dim))


def fingerprint(duration: np.ndarray, velocity: np.ndarray) -> bytes:
    """A hash of the segments of plans: their lengths, and the velocities of those that have a length."""
    used = np.where((duration > 0)[..., None], velocity, 0.0)
    parts = (np.ascontiguousarray(x, "<f8").tobytes() for x in (duration, used))
    return hashlib.sha256(b"".join(parts)).digest()


# Joint plans ---------------------------------------------------------------------------------------------------------


def _hash(use: str, *parts: bytes) -> bytes:
    return hashlib.sha256(f"fedpdmc {use}/".encode() + b"".join(parts)).digest()


def joint_seed(seeds: Sequence[bytes]) -> int:
    """The seed of the run's public stream, from those of the coordinator and of all sites."""
    return int.from_bytes(_hash("joint seed", *seeds)[:8], "little") >> 1


def _public_part(answer: messages.Arrivals, plan: bytes) -> messages.Arrivals:
    """What other sites are sent of an answer to plans with this hash."""
    nothing = {"passes": 0, "remaining": messages.NO_BUDGET, "observed": 0.0, "spent": 0.0}
    return dataclasses.replace(answer, sequence=0, request=plan, **nothing)


def _statement(site: str, answer: messages.Arrivals) -> bytes:
    return _hash("arrivals", site.encode(), messages.encode(dataclasses.replace(answer, signature=b"")))


def _verify(site: str, public: bytes, answer: messages.Arrivals) -> None:
    """Raise `BadAnswer` for the public part of an answer that its site has not signed with this key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(answer.signature, _statement(site, answer))
    except (InvalidSignature, ValueError) as error:
        raise BadAnswer(site, "arrivals that it has not signed") from error


def _digest(request: Request) -> bytes:
    """The hash of plans, the same for every site."""
    return messages.digest(messages.encode(dataclasses.replace(request, sequence=0)))


def announced(run: bytes, contract: bytes, site: str, opened: messages.Opened) -> bytes:
    """What a site signs with the key of its certificate: the hash of its seed and its key, in this run."""
    return _hash("announced", run, contract, opened.commitment, opened.public, site.encode())


class JointRandomness:
    """The coordinator's part: the seeds of all parties, and what the next request for arrivals has as evidence."""

    def __init__(self, study: Study, seed: int):
        self.study, self._own = study, _hash("coordinator", str(seed).encode())
        self.commitment = _hash("commitment", self._own)
        self.seeds: tuple[bytes, ...] = ()
        # With the sites' keys. A store of earlier software does not have these: then other sites alone check signatures.
        self.evidence, self.publics = self.seeds, self.seeds

    def begin(self, opened: Sequence[messages.Opened], revealed: Sequence[messages.Revealed]) -> None:
        """All parties have revealed their seeds."""
        for name, one, other in zip(self.study.sites, opened, revealed, strict=True):
            if _hash("commitment", other.seed) != one.commitment:
                raise BadAnswer(name, "another seed than the one that it has committed to")
        self.seeds = self.evidence = (self._own, *(one.seed for one in revealed))
        self.publics = tuple(one.public for one in opened)

    def add(self, request: Request, answers: Sequence[messages.Arrivals]) -> None:
        """The answers of a round, which the next request carries."""
        plan = _digest(request)
        public = [_public_part(answer, plan) for answer in answers]
        for name, key, answer in zip(self.study.sites, self.publics, public, strict=False):
            _verify(name, key, answer)
        self.evidence = tuple(map(messages.encode, public))


class _Round(NamedTuple):
    """Answered plans: their hash, where the chains were, what was planned, and the end of the block."""

    digest: bytes
    state: State
    itinerary: Itinerary
    until: float


class OwnPlans:
    """A site's part: it announces a seed and a key, both from a secret, signs its arrivals, and makes the plans for itself.

    ``entropy`` returns what the seed of an opening depends on besides, by the hash of the request: new at every other
    request, so that a site whose store was restored does not announce a seed that a coordinator has seen.
    Without ``credentials``, on a plain connection, nobody proves who he is. ``pinned`` has the fingerprints of the only
    certificates that are accepted for these sites. Other plans are refused if ``enforced``: not in one process.
    """

    def __init__(
        self,
        study: Study,
        name: str,
        secret: str,
        credentials=None,
        pinned=None,
        enforced: bool = True,
        entropy: Callable[[bytes], bytes] | None = None,
    ):
        self.study, self.name, self.enforced = study, name, enforced
        self.credentials, self._pinned = credentials, pinned or {}
        self._seed, private = (_hash(use, name.encode(), b"/", secret.encode()) for use in ("seed", "key"))
        self._entropy = entropy
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(private)
        self._opening: messages.Open | None = None
        # The hash of the seed in this run, as it was announced; and of the request.
        self._commitment, self._asked = messages.NOTHING_ASKED, messages.NOTHING_ASKED
        self._opened: list[messages.Opened] = []
        self._run: tuple[Coordinator, PublicKeys, State] | None = None
        self._last: _Round | None = None
        self._next: tuple[Request, _Round] | None = None

    def announce(self, message: messages.Open, asked: bytes) -> messages.Opened:
        """The answer to the opening, with the hash of the site's seed and its key, signed."""
        opened = messages.Opened(message.run, message.sequence, asked)
        if message.commitment == messages.NOTHING_ASKED and not self.enforced:
            return opened
        if message.commitment == messages.NOTHING_ASKED or len(message.turns):
            raise RequestRefused("NOT_JOINT")
        commitment = _hash("commitment", self._seed_of(asked))
        made = dataclasses.replace(opened, commitment=commitment, public=self._key.public_key().public_bytes_raw())
        if (own := self.credentials) is None:
            return made
        from fedpdmc.certificates import sign

        signature = sign(own, announced(message.run, self.study.digest, self.name, made))
        return dataclasses.replace(made, certificate=own.certificate, signature=signature)

    def reveal(self, message: messages.Reveal, asked: bytes) -> messages.Revealed:
        """The site's seed, if all sites have announced theirs, and proved their keys."""
        if self._opening is None or self._opened:
            raise RequestRefused("NOT_OPEN" if self._opening is None else "ALREADY_REVEALED")
        found = _read_openings(message)
        if len(found) != len(self.study.sites) or not all(map(self._proved, self.study.sites, found)):
            raise RequestRefused("KEY_NOT_PROVED")
        # Earlier software announced a seed from the secret alone.
        seeds = {_hash("commitment", seed): seed for seed in (self._seed, self._seed_of(self._asked))}
        if self._commitment not in seeds:
            raise RequestRefused("NOT_JOINT", "the store does not have the seed of this opening")
        return messages.Revealed(message.run, message.sequence, asked, seeds[self._commitment])

    def _seed_of(self, asked: bytes) -> bytes:
        """The seed that is announced in answer to the opening with this hash."""
        more = b"" if self._entropy is None else self._entropy(asked)
        return _hash("seed of an opening", self._seed, more) if more else self._seed

    def _proved(self, name: str, opened: messages.Opened) -> bool:
        own = self._commitment, self._key.public_key().public_bytes_raw()
        if name == self.name and (opened.commitment, opened.public) != own:
            return False
        if self.credentials is None:
            return True
        from fedpdmc.certificates import signature_fault

        assert self._opening is not None
        data = announced(self._opening.run, self.study.digest, name, opened)
        return not signature_fault(self.credentials, name, opened.certificate, opened.signature, data, self._pinned)

    def turn_keys(self, message: Request):
        """The public keys of the turns; None if the coordinator has sent its own in the opening."""
        return None if self._opening is None else self._begun(message)[1].turns

    def _begun(self, message: Request) -> tuple[Coordinator, PublicKeys, State]:
        """The coordinator as this site makes it, and its randomness, from the seeds in the first request."""
        if self._run is None:
            assert (opening := self._opening) is not None
            commitments = [opening.commitment, *(one.commitment for one in self._opened)]
            if not self._opened or [_hash("commitment", seed) for seed in message.evidence] != commitments:
                raise RequestRefused("NOT_JOINT")
            method = _method(self.study, opening, joint_seed(message.evidence))
            start = strong_types(start_state(method, -opening.begin))
            keys = PublicKeys.of(coordinator_key(method), method.chains)
            self._run = coordinator(method, -opening.begin), keys, start
        return self._run

    def check(self, message: Request, plans: messages.Message) -> None:
        """Raise `RequestRefused` for plans other than the site's own; ``plans`` are those of the message."""
        if self._opening is not None:
            self._begun(message)
            if self.enforced and isinstance(plans, messages.Plans):
                self._next = message, self._plan(message, plans)

    def record(self, message: messages.Message, plans: messages.Message, given: messages.Message) -> None:
        """Update the state after a request was answered; ``plans`` are those of the message."""
        if isinstance(message, messages.Open) and message.commitment != messages.NOTHING_ASKED:
            assert isinstance(given, messages.Opened)
            self._opening, self._commitment, self._asked = message, given.commitment, given.request
        elif isinstance(message, messages.Reveal):
            self._opened = _read_openings(message)
        elif isinstance(message, Request):
            if self._next is None or self._next[0] is not message:
                self.check(message, plans)
            self._last, self._next = self._next[1] if self._next is not None else None, None

    def sign(self, message: Request, answer: messages.Arrivals) -> messages.Arrivals:
        """An answer with the site's signature."""
        if self._opening is None:
            return answer
        statement = _statement(self.name, _public_part(answer, _digest(message)))
        return dataclasses.replace(answer, signature=self._key.sign(statement))

    def _plan(self, message: Request, plans: messages.Plans) -> _Round:
        """The site's own plans, after the arrivals in a request; `RequestRefused` if the request has others."""
        (public, keys, state), last, until, chain = self._begun(message), self._last, message.until, plans.chain
        before = state.t.min() if last is None else last.until
        if last is not None:
            arrivals, end = self._arrivals(message, last), jnp.full(state.t.shape, last.until)
            state, _, _ = finish_round(public, last.state, last.itinerary, arrivals, None, end, last.state.t < end)
        t, number, a, v = (np.array(x) for x in (state.t, state.number, state.a, state.v))
        wrong = not (until == before if (t < before).any() else until > before)
        if wrong or not np.array_equal(chain, np.flatnonzero(t < until)) or (plans.number != number[chain]).any():
            raise RequestRefused("NOT_MY_PLAN")
        _compare(chain, (a[chain], plans.start), (v[chain], plans.velocity[:, 0]))
        a[chain], v[chain] = plans.start, plans.velocity[:, 0]
        state = eqx.tree_at(lambda s: (s.a, s.v), state, (jnp.asarray(a), jnp.asarray(v)))
        itinerary = plan_ahead(public, keys, state, jnp.full(t.shape, until))
        duration, velocity = (np.asarray(x)[chain] for x in (itinerary.path.duration, itinerary.path.velocity))
        longest, used = plans.duration.shape[1], (plans.duration > 0)[..., None]
        own, rest = duration[:, :longest], duration[:, longest:]
        _compare(chain, (own, plans.duration), (rest, 0.0), (velocity[:, :longest] * used, plans.velocity * used))
        return _Round(_digest(message), state, itinerary, until)

    def _arrivals(self, message: Request, last: _Round):
        """The arrivals of all sites along the last plans, stacked; each has its site's signature."""
        found, plan, flips = [], jax.tree.map(np.asarray, last.itinerary.plan), self.study.dynamics().flips
        try:
            for name, opened, data in zip(self.study.sites, self._opened, message.evidence, strict=True):
                answer = messages.decode(data)
                if not isinstance(answer, messages.Arrivals) or (answer.run, answer.request) != (
                    message.run,
                    last.digest,
                ):
                    raise BadAnswer(name, "not the arrivals along the last plans")
                _verify(name, opened.public, answer)
                found.append(read_arrival(name, answer, plan, flips))
        except (WireError, BadAnswer, ValueError) as error:
            raise RequestRefused("NOT_SIGNED", f"arrivals of other sites that they have not signed: {error}") from error
        return jax.tree.map(lambda *x: np.stack(x), *found)


def _compare(chain: np.ndarray, *pairs) -> None:
    """Raise `RequestRefused` if rows of chains differ by more than rounding."""
    for mine, other in pairs:
        off = ~(np.abs(mine - other) <= ROUNDING * (1 + np.abs(other))).reshape(len(chain), -1).all(1)
        if off.any():
            raise RequestRefused("NOT_MY_PLAN", chain=int(chain[np.flatnonzero(off)[0]]) + 1)


def _read_openings(message: messages.Reveal) -> list[messages.Opened]:
    try:
        return messages.decode_parts(message.openings, messages.Opened)
    except WireError as error:
        raise RequestRefused("KEY_NOT_PROVED") from error


def _method(study: Study, opening: messages.Open, seed: int) -> Method:
    """The coordinator's method, as far as plans depend on it."""
    dynamics, prior, whitened = study.dynamics(), study.prior(), study.reference != "none"
    assert prior is None or isinstance(prior, Quadratic)
    center, scale = jnp.asarray(opening.center), jnp.asarray(opening.scale)
    reference, public = Reference(center, scale, {} if whitened else None), None
    if study.control == "none":
        public = public_potential((), prior, {}, reference, dynamics)
    elif not dynamics.flow.rotating:
        # The reference is the Gaussian of prior and control variates together.
        public = Quadratic(jnp.eye(reference.dim), jnp.zeros(reference.dim))
    return Method(
        sites=(), dim=reference.dim, prior=prior, prior_at="coordinator", dynamics=dynamics, reference=reference,
        reference_name=study.reference, control={}, control_name=study.control, chains=opening.chains,
        names=list(study.names), seed=seed, public=public, segments=opening.segments, wide_starts=whitened,
    )  # fmt: skip
