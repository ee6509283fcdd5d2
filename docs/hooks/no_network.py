"""Check that a built site loads nothing from a network: ``python -m docs.hooks.no_network FOLDER``."""

import re
import sys
from pathlib import Path

LOADS = (
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s>]*",
    r"<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|icon|preload|preconnect|modulepreload|dns-prefetch))[^>]*\bhref=[\"']?(?:https?:)?//[^\s>]*",
    r"url\(\s*[\"']?(?:https?:)?//[^)]*",
    r"\bimport\(?\s*[\"']https?://[^\"']*",
)


def found(folder: Path) -> list[str]:
    """Every reference of a page or style sheet that a browser would fetch from elsewhere, with its file."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".html", ".css")]
    return [
        f"{path.relative_to(folder)}: {match}"
        for path in files
        for pattern in LOADS
        for match in re.findall(pattern, path.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    site = Path(sys.argv[1])
    if not (site / "index.html").exists():
        sys.exit(f"{site} has no index.html: build the site first.")
    if problems := found(site):
        sys.exit("\n".join(["The site loads from a network:", *problems]))
