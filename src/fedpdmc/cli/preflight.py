"""`fedpdmc site --check` and `fedpdmc coordinator --check`: one line for each thing that was looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedpdmc.cli import studies
from fedpdmc.console.wrapping import say
from fedpdmc.operations.preflight import CoordinatorCheck, Finding, SiteCheck

FAULTS = 1


def coordinator(study: Path, listen: str, keys: Path | None, store: Path) -> int:
    """Look at what a coordinator needs."""
    return _told(CoordinatorCheck(study, listen=listen, keys=keys, store=store))


def site(
    study: Path,
    name: str,
    data: str,
    query: str | None,
    policy: Path,
    address: str,
    keys: Path | None,
    store: Path,
    ledger: Path | None,
    server_name: str,
) -> int:
    """Look at what a site needs."""
    return _told(
        SiteCheck(
            study,
            name,
            data if ":" in data else Path(data),
            query=query,
            policy=policy,
            coordinator=address,
            keys=keys,
            store=store,
            ledger=ledger,
            server_name=server_name,
        )
    )


def _told(check: SiteCheck | CoordinatorCheck) -> int:
    def work() -> int:
        findings: Sequence[Finding] = check.findings()
        for finding in findings:
            say(finding, whole=True)
        faults = [finding.what for finding in findings if finding.good is False]
        say(f"Not ready: {', '.join(faults)}." if faults else "Ready. Nothing has joined, nothing was told.")
        return FAULTS if faults else 0

    return studies.guarded(work)
