"""Seals of the sites' logs: kept by the coordinator, signed by both, so that neither can rewrite what was."""

import hashlib
import json
import shutil

import pytest
from tests.federation.studies import Folder
from tests.federation.test_agent import RUN, ask, joined, opening, plans

import fedpdmc as fp
from fedpdmc.certificates import read_credentials
from fedpdmc.errors import BadAnswer
from fedpdmc.federation import messages, session
from fedpdmc.federation.audit_seals import SEALED, Seal, Sealing, Witness, read_seals
from fedpdmc.federation.site_agent.audit_log import HEAD, TITLE, Kind, read_log
from fedpdmc.federation.site_agent.audit_replay import compare, show


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run over TLS: the coordinator's store and the sites'."""
    folder = Folder(tmp_path_factory.mktemp("study"))
    stores = {name: folder.path / "stores" / name for name in folder.study.sites}
    agents = {name: folder.agent(name, store) for name, store in stores.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "SEAL_SECONDS", 0.0)
        with folder.listening(store=folder.path / "run") as opened, folder.sites(opened, agents):
            fp.sample(opened, progress=False)
            opened.finish()
    return folder


@pytest.fixture
def kept(run, tmp_path):
    """Copies of what both sides have: of north its store, and the coordinator's seals."""
    shutil.copytree(run.path / "stores" / "north", tmp_path / "north")
    shutil.copy(run.path / "run" / "seals.jsonl", tmp_path)
    return tmp_path / "north", tmp_path / "seals.jsonl", run.keys("north") / "authority.pem"


def test_both_sides_have_what_the_other_has_signed(kept):
    store, seals, authority = kept
    assert compare(store, seals, authority) == []
    own = [line for line in read_seals(seals) if line["site"] == "north"]
    witnessed = [e.note for e in read_log(store) if e.kind is Kind.NOTE and e.note["event"] == "witnessed"]
    assert len(own) >= 2 and witnessed[-1]["seal"] == own[-1]["seal"]
    # Behind the last seal that both have signed there are only the notes of it and the farewell.
    assert sum(1 for _ in read_log(store)) - own[-1]["entries"] <= 3
    assert any(" witnessed " in line and "BEGIN CERTIFICATE" not in line for line in show(store))


def resealed(store, change):
    """A site rewrites its log, with all hashes right."""
    entries = change(list(read_log(store)))
    data, seal = bytearray(TITLE), hashlib.sha256(TITLE).digest()
    for entry in entries:
        head = HEAD.pack(len(entry.payload), entry.kind, entry.when)
        seal = hashlib.sha256(seal + head + entry.payload).digest()
        data += head + entry.payload + seal
    (store / "audit.log").write_bytes(data)


def altered(entries):
    return [entry._replace(when=entry.when + 1) if k == 5 else entry for k, entry in enumerate(entries)]


@pytest.mark.parametrize(
    "change", [altered, lambda entries: entries[:-8], lambda entries: entries[:5] + entries[6:]],
    ids=["altered", "shorter", "one left out"],
)  # fmt: skip
def test_a_log_that_the_site_has_rewritten_is_found(kept, change):
    store, seals, authority = kept
    resealed(store, change)
    assert sum(1 for _ in read_log(store)) > 10
    faults = compare(store, seals, authority)
    assert any("are not the ones that the site has sealed" in fault for fault in faults)


def test_a_seal_that_the_coordinator_has_made_up_is_found(kept):
    store, seals, authority = kept
    lines = [json.loads(line) for line in seals.read_text().splitlines()]
    own = [line for line in lines if line["site"] == "north"]
    own[0]["seal"] = 64 * "0"
    seals.write_text("".join(json.dumps(line) + "\n" for line in own))
    assert compare(store, seals, authority) == [
        f"the coordinator's seal of {own[0]['entries']} entries is not signed by site 'north'"
    ]
    seals.write_text("")
    assert "no seal of site 'north'" in compare(store, seals, authority)[0]


def test_a_receipt_that_the_site_has_made_up_is_found(kept):
    store, seals, authority = kept

    def forged(entries):
        note = {"event": "witnessed", "entries": 3, "seal": 64 * "0", "certificate": "", "signature": ""}
        return [*entries, entries[-1]._replace(kind=Kind.NOTE, payload=json.dumps(note).encode())]

    resealed(store, forged)
    assert compare(store, seals, authority) == [
        "the log contains a signature of the coordinator for 3 entries, but it is not valid"
    ]


def test_who_asks_for_seals_for_ever_does_not_fill_the_disk(run, tmp_path):
    agent = joined(run, tmp_path)
    ask(agent, opening())
    witness = Witness(run.study, RUN, read_credentials(run.keys("coordinator")))
    sizes = []
    for _ in range(20):
        answer = ask(agent, messages.encode(witness.request("north", 2)))
        witness.add("north", answer)
        sizes.append(agent.log.head[0])
    # The seal, and that it was received.
    assert sizes[1:] == [sizes[0] + 1] * 19
    assert isinstance(ask(agent, plans()), messages.Arrivals)
    assert ask(agent, messages.encode(witness.request("north", 3))).entries > answer.entries
    agent.log.close()
    again = run.agent("north", tmp_path)
    assert again.sealing._last is not None
    again.log.close()


@pytest.mark.parametrize("how", ["unsigned", "of another site", "of a shorter log", "of another log"])
def test_a_seal_that_is_not_the_sites_own_stops_the_run_by_name(run, how):
    witness = Witness(run.study, RUN, read_credentials(run.keys("coordinator")))

    def sealed(seal, by="north", signed=True):
        own = read_credentials(run.keys(by))
        from fedpdmc.certificates import sign

        said = sign(own, seal.statement(SEALED, RUN, run.study.digest, "north")) if signed else b""
        return messages.Attested(RUN, 1, bytes(32), *seal, own.certificate, said)

    witness.add("north", sealed(Seal(7, bytes(32))))
    wrong = {
        "unsigned": sealed(Seal(9, bytes(32)), signed=False),
        "of another site": sealed(Seal(9, bytes(32)), by="south"),
        "of a shorter log": sealed(Seal(6, bytes(32))),
        "of another log": sealed(Seal(7, bytes(31) + b"x")),
    }
    with pytest.raises(BadAnswer, match="site 'north': a seal "):
        witness.add("north", wrong[how])


def test_a_plain_connection_has_no_seals(run, tmp_path):
    """Nor a site without keys: it answers, unsigned."""
    agent = joined(run, tmp_path)
    plain = Sealing(agent.log, run.study, "north", None)
    request = messages.Attest(RUN, 1, 0, bytes(32), b"", b"")
    assert messages.decode(plain.seal(request, bytes(32))).signature == b""
    agent.log.close()
