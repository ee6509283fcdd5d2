"""With what a site's answers are made, as its log has it: other software, or another machine, may make other last bits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata

from fedpdmc.errors import InputError, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent.audit_log import Entry, Kind

EVENT = "software"
PACKAGES = ("fedpdmc", "jax", "jaxlib", "numpy")
UNKNOWN = "an unknown version"


def present() -> dict[str, str]:
    """The versions that are installed here, and the kind of machine."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    machine = {"machine": platform.machine(), "cores": str(os.cpu_count())}
    return versions | {"python": platform.python_version()} | machine


def written(entry: Entry) -> dict[str, str] | None:
    """What an entry of a log says of the software, if that is what it is about."""
    if entry.kind is not Kind.NOTE or entry.note["event"] != EVENT:
        return None
    return {key: str(value) for key, value in entry.note.items() if key != "event"}


def differences(entries: Iterable[Entry]) -> list[str]:
    """Each way in which what a log was written with differs from what is here; none if it is the same."""
    here, found = present(), [one for entry in entries if (one := written(entry)) is not None]
    words = [
        f"{name} {one.get(name, UNKNOWN)} (here {value})"
        for one in found or [{"fedpdmc": UNKNOWN}]
        for name, value in here.items()
        if one.get(name, UNKNOWN) != value and (found or name == "fedpdmc")
    ]
    return list(dict.fromkeys(words))


def logged(data: bytes, by: dict[str, str] | None) -> messages.Message:
    """A message of a log that was written by this software."""
    try:
        return messages.decode(data)
    except WireError as error:
        version = (by or {}).get("fedpdmc", UNKNOWN)
        raise InputError("store", f"a log of fedpdmc {version}: {error.found}", "Go on with that version.") from error
