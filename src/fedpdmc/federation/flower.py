"""Flower as the engine: a ServerApp and a ClientApp that carry a study's messages between SuperLink and SuperNodes.

Flower terminates TLS at the SuperLink, which relays. So every message is also signed with the keys of the study: the site
can verify the coordinator, and the coordinator the site, whatever is in between. A ClientApp is a new process for each
message, and the agent restores its state from its log. This takes seconds per round: use the few-rounds method.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before Flower is imported: it reads these once.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from flwr.app import ConfigRecord, Context, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

from fedpdmc.certificates import COORDINATOR, Credentials, read_credentials, sign, signer  # noqa: E402
from fedpdmc.console.interrupts import waiting  # noqa: E402
from fedpdmc.errors import InputError, Refused, WireError  # noqa: E402
from fedpdmc.federation import messages as wire  # noqa: E402
from fedpdmc.federation.transport import Request, Transport  # noqa: E402
from fedpdmc.study import Study, read_policy, read_study  # noqa: E402
from fedpdmc.validation import optional_seed  # noqa: E402

logger = logging.getLogger("fedpdmc.flower")
RECORD = "fedpdmc"
PAUSE = 3.0  # seconds between two searches for nodes, and before a failed message is sent again

client_app, server_app = ClientApp(), ServerApp()


class GridTransport(Transport):
    """Messages through a Flower grid."""

    def __init__(self, grid: Grid, study: Study, run: bytes, credentials: Credentials):
        self.grid, self.study, self.names, self._own = grid, study, study.sites, credentials
        self._welcome = wire.encode(wire.Welcome(run, study.digest))
        self._nodes: dict[str, int] = {}
        self._group = 0

    @property
    def credentials(self) -> Credentials | None:
        """The coordinator's keys."""
        return self._own

    def gather(self) -> None:
        """Wait until every site of the study was found among the nodes."""
        strangers: set[int] = set()
        while missing := [name for name in self.names if name not in self._nodes]:
            fresh = set(self.grid.get_node_ids()) - set(self._nodes.values()) - strangers
            answers = self._send(dict.fromkeys(fresh, b""))
            for node, (name, data) in answers.items():
                if self._is_member(name, data):
                    self._nodes[str(name)] = node
                    logger.info("site %s has joined", name)
                else:
                    strangers.add(node)
                    logger.warning("node %d is not a site of this study", node)
            if not answers:
                logger.info("waiting for %s", ", ".join(missing))
                with waiting():
                    time.sleep(PAUSE)

    def _is_member(self, name: str | None, data: bytes) -> bool:
        try:
            hello = wire.decode(data)
        except WireError:
            return False
        good = isinstance(hello, wire.Hello) and hello.site == name and hello.study == self.study.digest
        return good and name in self.names and name not in self._nodes

    def ask(self, requests: Sequence[Request | None]) -> list[bytes | None]:
        """One round. Messages that fail are sent again unchanged."""
        self.gather()
        pairs = zip(self.names, requests, strict=True)
        open_ = {self._nodes[name]: request.data for name, request in pairs if request is not None}
        owner = {node: name for name, node in self._nodes.items()}
        answers: dict[str, bytes] = {}
        while open_:
            for node, (name, data) in self._send(open_).items():
                if name == owner[node]:
                    answers[owner[node]] = data
                    del open_[node]
                else:
                    logger.warning("an answer of node %d is not signed by %s", node, owner[node])
            if open_:
                with waiting():
                    time.sleep(PAUSE)
        return [answers.get(name) for name in self.names]

    def _send(self, messages: dict[int, bytes]) -> dict[int, tuple[str | None, bytes]]:
        """Send messages to nodes; for each node the signer of the reply, and the reply."""
        self._group += 1
        outgoing = []
        for node, data in messages.items():
            record = ConfigRecord(
                {"welcome": self._welcome, "request": data, **_signed(self._own, self._welcome + data)}
            )
            outgoing.append(Message(RecordDict({RECORD: record}), node, "query", group_id=str(self._group)))
        found = {}
        for reply in self.grid.send_and_receive(outgoing) if outgoing else ():
            if reply.has_error():
                logger.warning("node %d: %s", reply.metadata.src_node_id, reply.error.reason)
                continue
            record = _record(reply)
            data = _bytes(record, "answer")
            found[reply.metadata.src_node_id] = (_signer(self._own, record, data), data)
        return found

    def status(self) -> str:
        """How many sites were found."""
        return f"{len(self._nodes)} of {len(self.names)} sites"

    def close(self):
        """Nothing to close: the grid belongs to Flower."""


def _signed(credentials: Credentials, data: bytes) -> dict[str, Any]:
    return {"signature": sign(credentials, data), "certificate": credentials.certificate}


def _record(message: Message) -> ConfigRecord:
    record = message.content.get(RECORD)
    return record if isinstance(record, ConfigRecord) else ConfigRecord()


def _bytes(record: ConfigRecord, key: str) -> bytes:
    value = record.get(key)
    return value if isinstance(value, bytes) else b""


def _signer(own: Credentials, record: ConfigRecord, data: bytes) -> str | None:
    return signer(own, _bytes(record, "certificate"), _bytes(record, "signature"), data)


@client_app.query()
def client(message: Message, context: Context) -> Message:
    """The site's part. Flower sends the text of exceptions to the server, so the site's are replaced by one code."""
    try:
        return _reply(message, context)
    except Exception as error:
        logger.error("%s", error)
    raise Refused(str(context.node_config.get("name")), "NOT_ANSWERED", "See the site's own log.")


def _reply(message: Message, context: Context) -> Message:
    """Verify the coordinator, restore the agent from its log, answer and sign."""
    from fedpdmc.federation.site_agent.start import open_agent

    options = context.node_config
    name, store = _option(options, "name"), _option(options, "store")
    own, study = read_credentials(_option(options, "keys")), read_study(_option(options, "study"))
    record = _record(message)
    welcome, request = _bytes(record, "welcome"), _bytes(record, "request")
    if _signer(own, record, welcome + request) != COORDINATOR:
        raise Refused(name, "NOT_THE_COORDINATOR", "A request was not signed by the coordinator of this study.")
    query = str(options["query"]) if "query" in options else None
    policy = read_policy(_option(options, "policy"))
    agent = open_agent(
        study, name, _option(options, "data"), query=query, policy=policy, store=store, credentials=own,
        seed=optional_seed("configuration: seed", options.get("seed")),
    )  # fmt: skip
    try:
        agent.join(welcome)
        data = agent.answer(request) if request else agent.hello()
    finally:
        agent.log.close()
    reply = ConfigRecord({"answer": data, **_signed(own, data)})
    return Message(RecordDict({RECORD: reply}), reply_to=message)


def _option(options: Any, key: str) -> str:
    value = options.get(key)
    if not isinstance(value, str) or not value:
        raise InputError(f"configuration: {key}", repr(value), "Set it for the node, or for the run at the server.")
    return value


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """The coordinator's part: run the study and save the posterior."""
    from fedpdmc.federation.session import join
    from fedpdmc.sampling.api import sample

    options = context.run_config
    store, seed = Path(_option(options, "store")), options.get("seed", -1)
    credentials = read_credentials(_option(options, "keys"))
    logging.getLogger("fedpdmc").setLevel(logging.INFO)

    def transport(study: Study, run: bytes, seed: int) -> Transport:
        return GridTransport(grid, study, run, credentials)

    with join(
        _option(options, "study"), transport, store=store, seed=seed if isinstance(seed, int) and seed >= 0 else None
    ) as connection:
        post = sample(connection, progress=False)
        post.save(store / "posterior.zarr")
        connection.finish()
    logger.info("saved %s\n%s", store / "posterior.zarr", str(post.summary()))
