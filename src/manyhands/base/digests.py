"""Digests of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

READ_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            sha256.update(part)
    return sha256.hexdigest()
