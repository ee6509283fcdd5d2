"""The site's side of a study: checks every request against contract, policy and log, and answers it once.

An agent turns one message into another. It does not know how messages travel: every engine carries the same bytes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field

from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates import Credentials
from fedpdmc.errors import FedPDMCError, InputError, Refused, RequestRefused, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.audit_seals import Sealing
from fedpdmc.federation.messages import RUN_BYTES, OtherVersion, claimed_kind, refuse_version, version_remedy
from fedpdmc.federation.site_agent import audit_log
from fedpdmc.federation.site_agent.audit_log import AuditLog, Kind
from fedpdmc.federation.site_agent.computation import Computation
from fedpdmc.federation.site_agent.request_checks import failed_disk, refusing_privacy_errors
from fedpdmc.version import __version__

logger = logging.getLogger("fedpdmc.site")
SOFTWARE = f"fedpdmc {__version__}"
# A coordinator stops when it is refused. One that is refused this often, with no answer in between, is broken or hostile.
MOST_REFUSALS = 20
MOST_LOGGED = 4096  # bytes of a request that is refused without any work, if the log has all of it
BEGINNING = 1024  # bytes of a longer one that the log has, with its hash
REFUSED_REQUEST = "refused request"

# Requests that are part of the sequence: each is answered once.
REQUESTS = (messages.Derive, messages.Open, messages.Plans, messages.TurnPlans, messages.Offer, messages.Agree)
REQUESTS = (*REQUESTS, messages.Reveal)


@dataclass
class Contact:
    """The state of a site's connection to its coordinator."""

    connected: bool = False
    working: bool = False
    # The time of the coordinator's last message, and the duration of the last answer.
    heard: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    _began: float | None = None

    def begin(self) -> None:
        """A message has arrived; the site works on it."""
        self.heard = self._began = time.monotonic()
        self.working = True

    def end(self) -> None:
        """The site waits for the next message. Does nothing else if none had arrived."""
        self.working = False
        if self._began is not None:
            self.heard = time.monotonic()
            self.seconds, self._began = self.heard - self._began, None


@dataclass(eq=False)
class Agent:
    """Answers requests about a site's records, within a contract."""

    computation: Computation
    log: AuditLog  # with the answers of an earlier process, if any
    credentials: InitVar[Credentials | None] = None  # the site's keys, with which it signs the hash of its log
    use: Callable[[], None] | None = None  # registers the use of the site's records before the first answer

    def __post_init__(self, credentials: Credentials | None):
        self.study, self.site = self.computation.study, self.computation.site
        self.run: bytes | None = None
        self.finished, self.contact = False, Contact()
        # Since the last new answer: refusals, and answers given again.
        self.refusals, self._repeated = 0, 0
        # The hash of a request that is in the log without its answer.
        self._in_progress: bytes | None = None
        self.sealing = Sealing(self.log, self.study, self.site.name, credentials)
        self._restore()

    @double_precision
    def _restore(self) -> None:
        """Restore the state at the end of the log, and log the current software if it has changed."""
        request, software = None, None
        for entry in self.log.entries():
            software = audit_log.software_of(entry) or software
            if entry.kind is Kind.NOTE:
                self._restore_note(entry.note)
            elif entry.kind is Kind.REQUEST:
                request = entry.payload
            elif entry.kind is Kind.REFUSAL:
                self.refusals += 1
                code = getattr(audit_log.read_logged(entry.payload, software), "code", "")
                self.computation.record_refusal(code, _decoded(request if self._in_progress is not None else None))
            elif entry.kind is Kind.ANSWER and request is not None:
                self.refusals = 0
                self._restore_answer(*(audit_log.read_logged(data, software) for data in (request, entry.payload)))
            self._in_progress = messages.digest(entry.payload) if entry.kind is Kind.REQUEST else None
        if self.run is not None:
            self.computation.check_ledger(self.run, self.log.folder)
        if software != (present := audit_log.software_here()):
            self.log.note(audit_log.SOFTWARE_EVENT, **present)

    def _restore_answer(self, request: messages.Message, answer: messages.Message) -> None:
        try:
            if isinstance(request, messages.Open) and request.chains != self.study.chains:
                raise ValueError("other chains than the contract's")
            self.computation.record(request, answer)
        except (FedPDMCError, OSError):
            raise
        except Exception as error:
            # Correct seals do not make it a log of this study.
            found = f"a log with a request {type(request).__name__} that this site cannot have answered"
            raise InputError("store", found, "Restore the log from a copy.") from error

    def _restore_note(self, note: dict) -> None:
        self.sealing.restore(note)
        if note["event"] != "joined":
            return
        if note["study"] != self.study.digest.hex():
            raise InputError("store", "the log of another contract", "Give every study its own store.")
        if note["site"] != self.site.name:
            raise InputError("store", f"the log of site {note['site']!r}", "Give every site its own store.")
        self.run = bytes.fromhex(note["run"])

    @property
    def observed_time(self) -> float:
        """Process time, summed over chains, that the coordinator has observed of this site."""
        return self.computation.progress.observed_time

    @property
    def privacy_spent(self) -> float | None:
        """The share of the account that all studies have spent; None without a budget, or before it is known."""
        private = self.computation.private
        return None if private is None else float(private.status.spent)

    def progress(self) -> str:
        """How much of what the contract allows has been used."""
        study, spent = self.study, ""
        if self.privacy_spent is not None:
            spent = f"; {100 * self.privacy_spent:.3g} % of the privacy budget spent"
        elif self.site.budget is None:
            spent = f"; {self.computation.information.words()}"
        return (
            f"answered {self.log.answers:,} of at most {study.rounds:,} requests; observed process time "
            f"{self.observed_time:,.4g} of at most {study.observed_time:,.4g}{spent}"
        )

    def hello(self, nonce: bytes = messages.NOTHING_ASKED) -> bytes:
        """The first message to the coordinator, with a nonce for it to sign."""
        return messages.encode(messages.Hello(self.site.name, self.study.digest, SOFTWARE, nonce))

    def join(self, data: bytes) -> None:
        """Accept the coordinator's welcome, or raise `Refused`."""
        try:
            message = messages.decode(data)
        except OtherVersion as error:
            remedy = version_remedy(data, "MALFORMED")
            self.log.note("refused", code="VERSION")
            raise Refused(self.site.name, "VERSION", remedy or str(error)) from error
        except WireError as error:
            raise self._refuse_to_join("MALFORMED") from error
        if isinstance(message, messages.Refusal):
            if (remedy := version_remedy(data, message.code)) is not None:
                raise Refused(self.site.name, "VERSION", remedy)
            raise Refused(self.site.name, message.code, "The coordinator refused this site.")
        if not isinstance(message, messages.Welcome):
            raise self._refuse_to_join("NOT_WELCOMED")
        if message.study != self.study.digest:
            raise self._refuse_to_join("OTHER_CONTRACT")
        if self.run is not None and message.run != self.run:
            raise self._refuse_to_join("OTHER_RUN")
        if self.run is None:
            self.run = message.run
            self.log.note("joined", run=message.run.hex(), study=message.study.hex(), site=self.site.name)

    def _refuse_to_join(self, code: str) -> Refused:
        self.log.note("refused", code=code)
        return Refused(self.site.name, code, "This site does not take part. Its log has the details.")

    @double_precision
    def answer(self, data: bytes) -> bytes:
        """The answer to a request, or a refusal; logged before it is returned."""
        asked, sequence = messages.digest(data), 0
        try:
            message = messages.decode(data)
            sequence = getattr(message, "sequence", 0)
            stored = self._stored_answer(message, asked)
            return stored if stored is not None else self._new_answer(message, data, asked)  # type: ignore[arg-type]
        except WireError as error:
            logger.warning("refused a message of the coordinator: %s", error)
            code = refuse_version() if isinstance(error, OtherVersion) else "MALFORMED"
            return self._refuse(data, asked, sequence, RequestRefused(code))
        except RequestRefused as refused:
            if (failure := failed_disk(refused)) is not None:
                raise failure from refused
            if refused.words:
                logger.error("not answered: %s", refused.words)
            logger.warning("refused request %d of the coordinator: %s", sequence, refused.code)
            return self._refuse(data, asked, sequence, refused)

    def _stored_answer(self, message: messages.Message, asked: bytes) -> bytes | None:
        """The answer to a request that was answered before, or is not part of the sequence; None if it is new."""
        if not isinstance(message, (*REQUESTS, messages.Farewell, messages.Attest, messages.AskAccount)):
            raise RequestRefused("NOT_A_REQUEST")
        if message.run != self.run:
            raise RequestRefused("OTHER_RUN")
        if isinstance(message, messages.Farewell):
            # Not part of the sequence: the run may be resumed.
            self.finished = True
            self.log.note("farewell")
            return messages.encode(messages.Opened(message.run, message.sequence, asked))
        if isinstance(message, messages.Attest):
            return self.sealing.seal(message, asked)
        if isinstance(message, messages.AskAccount):
            bits = self.computation.information.report() if self.site.budget is None else 0.0
            return messages.encode(messages.Accounted(message.run, message.sequence, asked, bits))
        if message.sequence < 1 or message.sequence > self.log.answers + 1:
            raise RequestRefused("OUT_OF_ORDER")
        if message.sequence == self.log.answers + 1:
            return None
        stored = self.log.read_answer(message.sequence - 1)
        if messages.decode(stored).request != asked:  # type: ignore[attr-defined]
            raise RequestRefused("SAME_ROUND_OTHER_PLAN")
        self._repeated += 1
        if not self._repeated & (self._repeated - 1):
            # Only the first, second, fourth, ... since the last new answer, so that repetition cannot fill the disk.
            self.log.note("again", sequence=message.sequence, times=self._repeated)
        return stored

    def _new_answer(self, message: messages.SiteRequest, data: bytes, asked: bytes) -> bytes:
        with _answering(message):
            self.computation.check(message)
        # A request is logged before it is processed, so that one that crashes the site is in the log too. After too many
        # refusals only answered requests are logged.
        suspect = self.refusals >= MOST_REFUSALS
        again = self._in_progress == asked
        if not again and not suspect:
            self._append(Kind.REQUEST, data)
        self._in_progress = asked
        if self.use is not None:
            with refusing_privacy_errors():
                self.use()
            self.use = None
        with refusing_privacy_errors():
            self.computation.information.begin(self.log.head[1].hex(), again)
        with _answering(message):
            answer = self.computation.compute(message, asked)
        out = messages.encode(answer)
        if suspect:
            self._append(Kind.REQUEST, data)
        self._append(Kind.ANSWER, out)
        self._in_progress, self.refusals, self._repeated = None, 0, 0
        self.computation.record(message, answer)
        return out

    def _append(self, kind: Kind, data: bytes) -> None:
        try:
            self.log.append(kind, data)
        except OSError as error:
            words = f"the audit log cannot be written, so the request is not answered: {error}"
            raise OSError(error.errno, words) from error

    def _refuse(self, data: bytes, asked: bytes, sequence: int, refused: RequestRefused) -> bytes:
        """Log a refused request and the refusal."""
        if self.refusals >= MOST_REFUSALS:
            # The log already shows why. A coordinator that continues like this must not fill the disk.
            raise Refused(
                self.site.name,
                "TOO_MANY_REFUSALS",
                f"The coordinator was refused {MOST_REFUSALS} times with no answer in between, the last time for "
                f"{refused.code}: this site stops. `fedpdmc audit show {self.log.folder}` shows the requests. Restart the "
                "site, with the same store, when the coordinator has been fixed.",
            )
        run = self.run or bytes(RUN_BYTES)
        refusal = messages.encode(messages.Refusal(run, sequence, asked, refused.code, refused.chain))
        try:
            if self._in_progress != asked and len(data) <= MOST_LOGGED:
                self.log.append(Kind.REQUEST, data)
            elif self._in_progress != asked:
                facts = {"code": refused.code, "kind": claimed_kind(data), "bytes": len(data), "sha256": asked.hex()}
                self.log.note(REFUSED_REQUEST, **facts, begins=data[:BEGINNING].hex())
            self.log.append(Kind.REFUSAL, refusal)
            self.refusals += 1
        except OSError as error:
            logger.error("the audit log cannot be written: %s", error)
        self._in_progress = None
        self.computation.record_refusal(refused.code, _decoded(data))
        return refusal

    @double_precision
    def adopt(self, request: bytes, answer: bytes) -> None:
        """Take over a request and its answer from another log."""
        self.log.append(Kind.REQUEST, request)
        self.log.append(Kind.ANSWER, answer)
        self.computation.record(messages.decode(request), messages.decode(answer))


@contextlib.contextmanager
def _answering(message: messages.SiteRequest) -> Iterator[None]:
    """Refuse what cannot be computed: it must not stop the site, for it would be sent again after a restart."""
    try:
        yield
    except (RequestRefused, OSError):
        raise
    except Exception as error:
        logger.exception("request %d could not be answered", message.sequence)
        raise RequestRefused("NOT_ANSWERED") from error


def _decoded(data: bytes | None) -> messages.Message | None:
    """A request, if it can be read."""
    with contextlib.suppress(WireError):
        return None if data is None else messages.decode(data)
    return None
