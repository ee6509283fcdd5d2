"""A bundle: one file with everything that a site needs to join a study; and the set-up of a site from it.

The file is a zip archive that anyone can open and read. It contains no secrets and is not signed. The attacker is someone
who changes it in transit: the site compares the SHA-256 of the whole file over another channel, so every byte of it is
covered. What goes into command lines must be the name of a host or a version, both in writing and in reading a bundle.
"""

from __future__ import annotations

import getpass
import hashlib
import io
import json
import os
import re
import shutil
import sys
import warnings
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec.structs import asdict

from fedpdmc.certificates import COORDINATOR, fingerprint, request_certificate
from fedpdmc.errors import InputError
from fedpdmc.federation.grpc.tls import split_address
from fedpdmc.operations.preflight import Finding, PreflightStep, SiteCheck, run_steps
from fedpdmc.privacy.budget import default_path
from fedpdmc.study import Study, parse_study, read_study
from fedpdmc.study.description import choice
from fedpdmc.study.policy import MOST_CHAINS, MOST_DERIVATIVES
from fedpdmc.study.read_data import is_database
from fedpdmc.study.schema import Keys, parse_toml, read, read_bytes, toml_lines
from fedpdmc.validation import check_fingerprint, check_host, check_plain
from fedpdmc.version import __version__

FORMAT = 1
MOST_BYTES = 2**20  # of a file in a bundle
CONTRACT = "study.toml"
AUTHORITY = "authority.pem"
FACTS = "bundle.json"
README = "README.txt"
# In a bundle whose contract names a model file.
MODEL = "model.fpm"
MEMBERS = {CONTRACT, AUTHORITY, FACTS, README}
UNIT = "fedpdmc-site.service"
LOCAL = ("contract", "data", "policy", "ledger", "certificate", "store", "disk")  # the checks that need no coordinator
# In a site's folder: its options, and the hash of the bundle from which it was set up.
SETTINGS = "site.toml"
JOINED = "bundle.sha256"
# A version of the package, which goes into `pip install`.
VERSION = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,63}")
INSTRUCTIONS = """\
An invitation to take part in the study "{name}" with fedpdmc {version}.

1. Compare the SHA-256 of this file (sha256sum THIS-FILE) by telephone with its sender, before you follow this text.
2. Install the same version:         pip install 'fedpdmc[federation]=={version}'
3. Set up your site:                 fedpdmc join THIS-FILE --sha256 HASH --name YOUR-SITE --data RECORDS.csv --folder study
   This makes your private key, which never leaves your machine, and a certificate request, keys/request.pem.
   Tell the sender the SHA-256 of your key, which this step prints.
4. Send keys/request.pem to them. Put the certificate.pem that you receive into study/keys.
5. Read study.toml and policy.toml, and a model file if there is one (fedpdmc model show). You decide what your site allows.
6. Run the command of step 3 again. It checks everything, without joining.
7. Run study/fedpdmc-site.service, or the command in it.

Coordinator: {coordinator}
"""


class BundleFacts(Keys):
    """What bundle.json says."""

    format: Literal[FORMAT]  # pyright: ignore[reportInvalidTypeForm]
    coordinator: str
    server_name: str
    fedpdmc: str


class Bundle(NamedTuple):
    """The content of a bundle: contract, authority's certificate, the coordinator's address and name, and a model file."""

    contract: bytes
    authority: bytes
    coordinator: str
    server_name: str
    version: str
    model: bytes = b""
    # SHA-256 of the file.
    digest: str = ""

    @property
    def study(self) -> Study:
        """The parsed contract."""
        return parse_study(self.contract, lambda name: self.model)


def make_bundle(
    study: str | Path, authority: str | Path, coordinator: str, out: str | Path, server_name: str = COORDINATOR
) -> Path:
    """Write the bundle for the sites of a study.

    ``study``: the contract. ``authority``: the certificate of the study's authority. ``coordinator``: ``host:port``, as
    seen by the sites. ``out``: a new file. ``server_name``: the name that the coordinator's certificate has.
    """
    split_address(coordinator, "coordinator")
    check_host(server_name, "server_name")
    named = read_study(study).model_file
    model = b"" if named is None else _read(Path(study).parent / named)
    bundle = Bundle(_read(study), _read(authority), coordinator, server_name, __version__, model)
    for words in choice(bundle.study):
        warnings.warn(words, stacklevel=2)
    text = INSTRUCTIONS.format(name=bundle.study.name, version=__version__, coordinator=coordinator)
    _check_authority(bundle.authority)
    facts = asdict(BundleFacts(FORMAT, coordinator, server_name, __version__))
    path = Path(out)
    try:
        with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as file:
            for member, data in (
                (README, text), (CONTRACT, bundle.contract), (AUTHORITY, bundle.authority), (FACTS, json.dumps(facts)),
                *([(MODEL, bundle.model)] if bundle.model else []),
            ):  # fmt: skip
                file.writestr(member, data)
    except FileExistsError as error:
        raise InputError("out", f"{path}, which already exists", "Give a new file.") from error
    return path


def read_bundle(path: str | Path, sha256: str | None = None) -> Bundle:
    """Read a bundle whose SHA-256 is the given one, if there is one. Nothing is unpacked to the paths that it names."""
    remedy = "Give the file from `fedpdmc bundle`, unchanged."
    data = _read(path)
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and check_fingerprint(sha256) != digest:
        raise InputError(
            "bundle", f"a file with SHA-256 {digest}", "It was changed on its way, or the hash is another's."
        )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            infos = {info.filename: info for info in file.infolist()}
            if set(infos) - {MODEL} != MEMBERS or len(file.infolist()) != len(infos):
                raise InputError("bundle", f"{path} with {', '.join(map(ascii, sorted(infos)[:8]))}", remedy)
            if any(info.file_size > MOST_BYTES for info in infos.values()):
                raise InputError("bundle", f"{path} with a file above 1 MiB", remedy)
            contract, authority, facts = (file.read(name) for name in (CONTRACT, AUTHORITY, FACTS))
            model = file.read(MODEL) if MODEL in infos else b""
            # A person reads them with other programs.
            for name in (README, AUTHORITY):
                check_plain(file.read(name).decode(), f"bundle: {name}")
        facts = read(BundleFacts, json.loads(facts), f"{path}: bundle.json")
        if not VERSION.fullmatch(facts.fedpdmc):
            raise InputError("bundle: fedpdmc", repr(facts.fedpdmc), "Ask for a bundle with the number of a version.")
    except InputError:
        raise
    except Exception as error:
        # Damaged archives raise many kinds of errors.
        raise InputError("bundle", f"{path}: {error}", remedy) from error
    split_address(facts.coordinator, "bundle: coordinator")
    check_host(facts.server_name, "bundle: server_name")
    _check_authority(authority)
    return Bundle(contract, authority, facts.coordinator, facts.server_name, facts.fedpdmc, model, digest)


class SiteSettings(Keys):
    """The options of a site in its folder."""

    name: str
    data: str
    coordinator: str
    query: str | None = None
    server_name: str | None = None
    ledger: str | None = None


class Joining:
    """The set-up of a site's folder from a bundle, and its checks.

    Parameters
    ----------
    name : str
        The site's, as in the contract.
    source, query
        The records, as `fedpdmc.study.read_records` takes them.
    folder : path
        The study's folder at this site. Existing files are kept; another bundle is refused.
    ledger : path, optional
        The site's privacy ledger. Its folder has the register of the record sets that the site's studies have used.
    """

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        source: str | Path,
        folder: str | Path,
        query: str | None = None,
        ledger: Path | None = None,
    ):
        self.bundle, self.name, self.query, self.folder = bundle, name, query, Path(folder).absolute()
        # Absolute paths: the unit runs in the study's folder.
        path = str(source).removeprefix("sqlite:")
        address = source if path == str(source) else f"sqlite:{Path(path).absolute()}"
        self.source = address if is_database(source) else Path(source).absolute()
        self.study, self.key = bundle.study, ""
        self.ledger = (ledger or default_path()).absolute()
        if name not in self.study.sites:
            raise InputError("name", repr(name), f"Give one of the contract's sites: {', '.join(self.study.sites)}.")

    def write(self) -> list[str]:
        """Write the files that do not exist yet, including a private key; returns their names."""
        keys, made = self.folder / "keys", []
        keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.ledger.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        given = {
            self.folder / CONTRACT: self.bundle.contract,
            keys / AUTHORITY: self.bundle.authority,
            self.folder / JOINED: self.bundle.digest.encode(),
        }
        if self.study.model_file is not None:
            given[self.folder / self.study.model_file] = self.bundle.model
        for path, data in given.items():
            if path.exists() and path.read_bytes() != data:
                remedy = (
                    "Give every study its own folder. If the sender means to replace the file, compare its hash first."
                )
                raise InputError("bundle", f"a different {path.name} than {path}", remedy)
        drafts = {
            **given,
            self.folder / "policy.toml": draft_policy(self.study).encode(),
            self.folder / SETTINGS: self.settings().encode(),
            self.folder / UNIT: self.unit().encode(),
        }
        if not (keys / "certificate.pem").exists():
            path, self.key = request_certificate(keys, self.name)
            made.append(str(path))
        for path, data in drafts.items():
            if not path.exists():
                path.write_bytes(data)
                made.append(str(path))
        return made

    @property
    def ready(self) -> bool:
        """Whether the certificate was received."""
        return (self.folder / "keys" / "certificate.pem").exists()

    def settings(self) -> str:
        """The file from which `fedpdmc site --folder` knows its options."""
        bundle, source, ledger = self.bundle, str(self.source), str(self.ledger)
        options = SiteSettings(self.name, source, bundle.coordinator, self.query, bundle.server_name, ledger)
        return "\n".join([*toml_lines(asdict(options)), ""])

    def unit(self) -> str:
        """The unit file of this site."""
        program = shutil.which("fedpdmc", path=os.path.dirname(sys.executable)) or shutil.which("fedpdmc")
        words = [os.path.abspath(program or "fedpdmc"), "site", "--folder", str(self.folder)]
        try:
            user = getpass.getuser()
        except (KeyError, OSError, ImportError):
            user = "fedpdmc"
        return site_unit(user, self.folder, words, [self.folder, self.ledger.parent])

    def findings(self, alone: bool = False) -> list[Finding]:
        """All checks of `fedpdmc site --check`; without a certificate those of versions, records and policy.

        ``alone``: the coordinator does not run yet, so only what is at this site is checked.
        """
        steps = SiteCheck(
            self.folder / CONTRACT, self.name, self.source, query=self.query, coordinator=self.bundle.coordinator,
            keys=self.folder / "keys", store=self.folder / "store", policy=self.folder / "policy.toml",
            ledger=self.ledger, server_name=self.bundle.server_name,
        ).steps()  # fmt: skip
        if alone or not self.ready:
            local = ("contract", "data", "policy") if not self.ready else LOCAL
            steps = [PreflightStep("versions", self._versions), *(step for step in steps if step.what in local)]
        return run_steps(steps)

    def _versions(self) -> str:
        if self.bundle.version != __version__:
            found = f"fedpdmc {__version__} here, {self.bundle.version} in the bundle"
            raise InputError("versions", found, f"pip install 'fedpdmc[federation]=={self.bundle.version}'")
        return f"fedpdmc {__version__}, as in the bundle"


def read_settings(folder: Path) -> SiteSettings:
    """The options of a site that `fedpdmc join` set up."""
    path = folder / SETTINGS
    return read(SiteSettings, parse_toml(_read(path), str(path)), str(path))


def draft_policy(study: Study) -> str:
    """A policy that allows this contract and no more, unless it has very many chains. The site should read it."""
    lines = [
        "# Generated from the contract: it allows this contract and no more. Read it; you decide what this site allows.",
        f'families = ["{study.family}"]' if study.model_file is None else f'models = ["{study.model_digest}"]',
        "least_records = 20",
        "most_parameters_per_record = 0.2",
        f'derivatives = "{study.derivatives}"',
        f"passes = {str(study.passes).lower()}",
        f"most_rounds = {study.rounds}",
        f"most_observed_time = {float(study.observed_time)!r}",
        # A site holds all chains in memory: more than usual must be the site's own decision.
        f"most_chains = {min(study.chains, MOST_CHAINS)}",
        f"least_sites = {len(study.sites)}",
    ]
    if study.derivatives != "none" and study.most_derivatives > MOST_DERIVATIVES:
        lines.append(f"most_derivatives = {study.most_derivatives}  # each point costs bits: docs/information.md")
    if why := study.coordinator_chooses:
        lines.append(f"# coordinator_may_choose = true  # for {why}: its operator chooses where records are asked")
    if study.epsilon is not None:
        lines.append(f"largest_epsilon = {float(study.epsilon)!r}")
    return "\n".join(lines) + "\n"


_read = partial(read_bytes, argument="bundle", remedy="Give a file that can be read.")


def _check_authority(certificate: bytes) -> None:
    try:
        fingerprint(certificate)
    except ValueError as error:
        raise InputError("authority", str(error), "Give the authority's certificate, authority.pem.") from error


UNIT_TEXT = """\
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

    ``folder``: the study's, absolute. ``command``: the program, absolute, and its arguments. ``writes``: what it may
    write.
    """
    needed = [folder, Path(command[0]), *writes]
    at_home = any(path.is_relative_to(home) for path in needed for home in ("/home", "/root", "/run/user"))
    return UNIT_TEXT.format(
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
