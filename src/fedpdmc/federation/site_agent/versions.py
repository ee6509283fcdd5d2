"""The software and machine that computed a site's answers, as its log records them: others may differ in the last bits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata

from fedpdmc.errors import InputError, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.messages import MEANING, OtherVersion, version_of
from fedpdmc.federation.site_agent.audit_log import Kind, LogEntry

EVENT = "software"
PACKAGES = ("fedpdmc", "jax", "jaxlib", "numpy")
UNKNOWN = "an unknown version"


def present() -> dict[str, str]:
    """The versions that are installed here, and the machine."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    machine = {"machine": platform.machine(), "cores": str(os.cpu_count())}
    return versions | {"python": platform.python_version()} | machine


def written(entry: LogEntry) -> dict[str, str] | None:
    """The software that an entry of a log records, if it is such an entry."""
    if entry.kind is not Kind.NOTE or entry.note["event"] != EVENT:
        return None
    return {key: str(value) for key, value in entry.note.items() if key != "event"}


def differences(entries: Iterable[LogEntry]) -> list[str]:
    """Differences between the software that wrote a log and the current one."""
    here, found = present(), [one for entry in entries if (one := written(entry)) is not None]
    words = [
        f"{name} {one.get(name, UNKNOWN)} (here {value})"
        for one in found
        for name, value in here.items()
        if one.get(name, UNKNOWN) != value
    ]
    return list(dict.fromkeys(words))


def logged(data: bytes, by: dict[str, str] | None) -> messages.Message:
    """A message from a log, which the software ``by`` has written."""
    try:
        if (wire := version_of(data)) < MEANING:
            raise OtherVersion(wire)
        return messages.decode(data)
    except WireError as error:
        version = (by or {}).get("fedpdmc", UNKNOWN)
        raise InputError(
            "store", f"a log of fedpdmc {version}: {error.found}", "Continue with that version."
        ) from error
