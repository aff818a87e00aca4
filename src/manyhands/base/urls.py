"""Addresses of data and packages that a user gives, which may hold a password or a signature."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit, urlunsplit

from manyhands.base.errors import ConfigError


def parts_of(url: str) -> SplitResult:
    """The parts of an address (RFC 3986).

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return urlsplit(url)
    except ValueError as error:
        shown = url.rpartition("@")[2].partition("?")[0]  # without a password and a signature
        raise ConfigError(
            f"the address {shown!r} cannot be read ({error}); give one such as http://203.0.113.7:8000/index.json"
        ) from error


def has_secret(url: str) -> bool:
    """Whether there is a user, password or signature in an address."""
    parts = parts_of(url)
    return "@" in parts.netloc or bool(parts.query)


def without_secrets(url: str) -> str:
    """Write an address for a log or an error, without the user, password or signature that may be in it."""
    parts = parts_of(url)
    netloc = f"***@{parts.netloc.rpartition('@')[2]}" if "@" in parts.netloc else parts.netloc
    return urlunsplit(parts._replace(netloc=netloc, query="***" if parts.query else ""))
