"""Fail when reading a built page would fetch something from another host.

    python tests/offline.py _build/html

Links that a reader may click are fine; scripts, styles, images, fonts and frames that load by
themselves are not.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADING = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
NOT_LOADED = {"alternate", "author", "canonical", "index", "license", "next", "prev", "search"}
REMOTE = re.compile(r"(?:^|,)\s*(?:https?:)?//", re.I)
REMOTE_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)['"]?((?:https?:)?//[^'")\s]+)""", re.I)
REMOTE_SCRIPT = re.compile(
    r"""(?:\bimport\s*\(?|\bfrom|\bfetch\s*\(|importScripts\s*\()\s*['"]((?:https?:)?//[^'"]+)"""
    r"""|\.src\s*=\s*['"]((?:https?:)?//[^'"]+)"""
)


class Page(HTMLParser):
    """Collects in `remote` what a browser would request from elsewhere."""

    def __init__(self):
        super().__init__()
        self.remote: list[str] = []
        self.inside = None

    def handle_starttag(self, tag, attrs):
        attributes = {name: value or "" for name, value in attrs}
        self.inside = tag if tag in ("script", "style") else self.inside
        if tag == "link" and not set(attributes.get("rel", "").lower().split()) <= NOT_LOADED:
            loaded = ("href",)
        else:
            loaded = LOADING.get(tag, ())
        for name in loaded:
            if REMOTE.search(attributes.get(name, "")):
                self.remote.append(f"<{tag} {name}={attributes[name]}>")
        self.remote += [found for found in REMOTE_STYLE.findall(attributes.get("style", ""))]

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = None

    def handle_data(self, data):
        if self.inside == "style":
            self.remote += REMOTE_STYLE.findall(data)
        elif self.inside == "script":
            self.remote += ["".join(found) for found in REMOTE_SCRIPT.findall(data)]


def remote_loads(site: Path) -> dict[str, list[str]]:
    """Page or style sheet (path below `site`) -> what it loads from another host.

    Raises FileNotFoundError when there is no page at all.
    """
    pages = sorted(site.rglob("*.html"))
    if not pages:
        raise FileNotFoundError(f"No built page in {site}: run make book first.")
    found = {}
    for path in pages:
        page = Page()
        page.feed(path.read_text(encoding="utf-8"))
        found[path] = page.remote
    for path in sorted(site.rglob("*.css")):
        found[path] = REMOTE_STYLE.findall(path.read_text(encoding="utf-8"))
    return {path.relative_to(site).as_posix(): loads for path, loads in found.items() if loads}


def main(site: str) -> int:
    found = remote_loads(Path(site))
    for name, loads in found.items():
        print(f"{name} loads from another host: {', '.join(sorted(set(loads)))}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
