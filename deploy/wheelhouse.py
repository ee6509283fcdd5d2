"""Install without a network, every file known by its SHA-256.

``python deploy/wheelhouse.py fill FOLDER`` downloads what this Python needs, each file checked against ``requirements.txt``
beside this script, builds the wheel of the package, and writes ``FOLDER/requirements.txt``, from which all of it can be
installed elsewhere. ``python deploy/wheelhouse.py lock`` updates the hashes for the versions in ``constraints.txt``.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LOCK, ROOT = HERE / "requirements.txt", HERE.parent
# What a coordinator or a site runs.
EXTRAS = "federation,postgresql,privacy"
PYTHONS = ("3.11", "3.12", "3.13")
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
TITLE = f"# fedpdmc[{EXTRAS}] on Linux (x86-64), Python {', '.join(PYTHONS)}: every file by its SHA-256.\n"


def resolved(python: str) -> dict[tuple[str, str], str]:
    """Name and version of each package for a version of Python, with the hash of its wheel."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        words = ["install", "--dry-run", "--ignore-installed", "--target", name, "--only-binary=:all:"]
        words += ["--python-version", python, "--constraint", str(ROOT / "constraints.txt"), "--report", str(report)]
        subprocess.run([*PIP, *words, f"{ROOT}[{EXTRAS}]"], check=True)
        found = json.loads(report.read_text())["install"]
    return {
        (re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower(), one["metadata"]["version"]): one["download_info"][
            "archive_info"
        ]["hashes"]["sha256"]
        for one in found
        if one["metadata"]["name"] != "fedpdmc"
    }


def line(name: str, version: str, hashes: set[str]) -> str:
    """A requirement with the hashes of its files."""
    return f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(hashes)) + "\n"


def lock() -> None:
    """Write the hashes of all wheels for all versions of Python."""
    hashes: dict[tuple[str, str], set[str]] = {}
    for python in PYTHONS:
        for key, digest in resolved(python).items():
            hashes.setdefault(key, set()).add(digest)
    LOCK.write_text(TITLE + "".join(line(*key, own) for key, own in sorted(hashes.items())))


def fill(folder: Path) -> None:
    """Download everything that is locked and build the package's own wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(LOCK)]
    subprocess.run([*PIP, *words, "--dest", str(folder)], check=True)
    for old in folder.glob("fedpdmc-*.whl"):
        old.unlink()
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (own,) = folder.glob("fedpdmc-*.whl")
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    mine = line(f"fedpdmc[{EXTRAS}]", own.name.split("-")[1], {digest})
    (folder / "requirements.txt").write_text(LOCK.read_text() + mine)
    shutil.copy(ROOT / "LICENSE", folder)
    print(f"{len(list(folder.glob('*.whl')))} wheels in {folder}. Copy the folder, and install from within it:")
    print("    pip install --no-index --find-links . --require-hashes --requirement requirements.txt")
    print(f"SHA-256 of requirements.txt: {hashlib.sha256((folder / 'requirements.txt').read_bytes()).hexdigest()}")


if __name__ == "__main__":
    if sys.argv[1:] == ["lock"]:
        lock()
    elif sys.argv[1:2] == ["fill"] and len(sys.argv) == 3:
        fill(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
