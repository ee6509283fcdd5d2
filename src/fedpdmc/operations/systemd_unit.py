"""The systemd unit of a site: it may compute, open sockets and write to its own folders, and little else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

UNIT = """\
[Unit]
Description=fedpdmc site
Wants=network-online.target
After=network-online.target

[Service]
User={user}
WorkingDirectory={folder}
ExecStart={command}
Restart=on-failure
RestartSec=10
# Exit status 2 (refused): an operator must act, so do not restart.
RestartPreventExitStatus=2
UMask=0077
LimitNOFILE=65536
# Write access: the study's folder, the folder of the ledger, and a cache of compiled programs.
ProtectSystem=strict
ProtectHome={home}
ReadWritePaths={writes}
CacheDirectory=fedpdmc
Environment=XDG_CACHE_HOME=%C/fedpdmc
PrivateTmp=true
PrivateDevices=true
PrivateUsers=true
# Permissions: open sockets and compute. JAX compiles, so memory must be allowed to become executable, and reads
# /proc/cpuinfo: hiding it (ProcSubset) could change the last bits.
CapabilityBoundingSet=
NoNewPrivileges=true
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
LockPersonality=true
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM
ProtectClock=true
ProtectControlGroups=true
ProtectHostname=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
ProtectProc=invisible
RemoveIPC=true
DevicePolicy=closed
KeyringMode=private

[Install]
WantedBy=multi-user.target
"""


def site_unit(user: str, folder: Path, command: Sequence[str], writes: Sequence[Path]) -> str:
    """A unit that runs a command in a folder.

    Parameters
    ----------
    user : str
    folder : Path
        The study's, absolute.
    command : sequence of str
        The program, absolute, and its arguments.
    writes : sequence of Path
        What it may write.
    """
    needed = [folder, Path(command[0]), *writes]
    at_home = any(path.is_relative_to(home) for path in needed for home in ("/home", "/root", "/run/user"))
    return UNIT.format(
        user=user,
        folder=_specifiers(str(folder)),
        command=" ".join(map(_word, command)),
        home="read-only" if at_home else "true",
        writes=" ".join(_word(str(path)) for path in writes),
    )


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """A word of a command, quoted for systemd: no specifier, variable or second word in it."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    plain = _specifiers(plain).replace("\n", "\\n").replace("\t", "\\t")
    safe = plain == text and text and not any(c.isspace() or c in "'\";" for c in text)
    return plain if safe else f'"{plain}"'
