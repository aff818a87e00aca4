"""The files of the page, as they are in the package."""

from __future__ import annotations

import hashlib
import html
from dataclasses import dataclass
from importlib.resources import files

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
"""The endings of the files that are served, with their media types."""


@dataclass(frozen=True)
class PageFiles:
    """The page.

    Attributes:
        version: a digest of all files.
        index: the first file.
        static: the others, by their path below ``/static``. It begins with the version, so that browsers may keep them
            for good.
    """

    version: str
    index: bytes
    static: dict[str, bytes]


def page_files(*, has_model: bool, join: str = "") -> PageFiles:
    """Read the files.

    Args:
        has_model: show the box that fills masks.
        join: the command with which visitors join the run; empty for none.
    """
    root = files("manyhands.monitor.web") / "static"
    found = {
        prefix + file.name: file.read_bytes()
        for prefix, folder in (("", root), ("vendor/", root / "vendor"))
        for file in folder.iterdir()
        if file.is_file() and file.name.rpartition(".")[2] in TYPES
    }
    found["index.html"] = (
        found["index.html"]
        .replace(b"{model}", b"yes" if has_model else b"no")
        .replace(b"{hides-join}", b"" if join else b"hidden")
        .replace(b"{join}", html.escape(join).encode())
    )
    version = hashlib.sha256(b"".join(found[name] for name in sorted(found))).hexdigest()[:16]
    index = found.pop("index.html").replace(b"{static}", f"/static/{version}".encode())
    return PageFiles(version, index, {f"{version}/{name}": content for name, content in found.items()})
