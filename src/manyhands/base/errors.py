"""All errors of the library, as one tree.

::

    ManyhandsError
    ├── ConfigError            a value is wrong: says the value, the rule and a value that would work
    │   ├── MissingExtra       a part of the library needs a package that is not installed
    │   ├── ManifestMismatch   this peer's model or settings differ from those of the run
    │   └── RunNotFound        none of the peers that were joined is in this run
    ├── Unavailable            the network failed, a retry may help: says who, what address, how long, what to try
    │   ├── Timeout            names the phase it waited in and for whom
    │   ├── PeerLost           the connection to a peer closed, or its heartbeat stopped
    │   ├── DialFailed         one address could not be reached; carries the reason
    │   └── JoinFailed         none of the initial peers answered; carries a reason for each
    ├── PeerError              another peer did something wrong: carries its peer id
    │   ├── ProtocolViolation  it sent what the protocol does not allow
    │   ├── BadSignature       a signature does not match its owner
    │   └── Refused            it understood the request and refused it
    ├── RoundAborted           carries the reason and the members blamed
    │   ├── NothingToAverage   all members gave a weight of 0
    │   ├── NobodyThere        all expected peers are gone, at another round, or do not come
    │   └── TooSlow            the members' lines cannot carry the round in its time
    └── RankLost               another process of this peer's job is gone or failed: end this one too
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ManyhandsError(Exception):
    """Base of all errors that this library raises on purpose. They can be copied and pickled."""

    @property
    def entry(self) -> str:
        """The part of the documentation that says what this kind of error means, and what to do."""
        return f"docs/reference/errors.md#{type(self).__name__.lower()}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy without the constructor, which would take the message for its arguments."""
        return _copied, (type(self), self.args), vars(self)


def _copied(kind: type[ManyhandsError], args: tuple[Any, ...]) -> ManyhandsError:
    return kind.__new__(kind, *args)


class ConfigError(ManyhandsError, ValueError):
    """A value given by the user breaks a rule; the message says the value, the rule and a value that would work."""


class MissingExtra(ConfigError):
    """A part of the library needs a package that is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs packages that are not installed; try: {_install(extra)}")
        self.extra = extra


def _install(extra: str) -> str:
    """Return the command that installs an extra: from the checkout, if this package runs from one."""
    checkout = own_checkout()
    if checkout is None:
        return f"pip install 'manyhands[{extra}]'"
    return f"pip install '.[{extra}]' in {checkout}"


def own_checkout() -> Path | None:
    """Return the checkout that this package runs from; None if it was installed."""
    source = Path(__file__).resolve().parents[2]
    return source.parent if source.name == "src" and (source.parent / "pyproject.toml").is_file() else None


class ManifestMismatch(ConfigError):
    """This peer's model or settings differ from those of the run that it joins.

    Attributes:
        differences: one line for each difference, with the value here and the value of the run.
    """

    def __init__(self, run_id: str, differences: Sequence[str]) -> None:
        super().__init__(f"this peer does not fit run {run_id!r}: " + "; ".join(differences))
        self.run_id = run_id
        self.differences = list(differences)


class RunNotFound(ConfigError):
    """None of the peers that were reached is in this run; usually its name was mistyped."""


class Unavailable(ManyhandsError):
    """Something in the network did not answer; a retry may help."""


class Timeout(Unavailable):
    """A wait reached its deadline; ``phase`` says what was waited for."""

    def __init__(self, phase: str, timeout_s: float) -> None:
        super().__init__(f"timed out after {timeout_s:g} s {phase}")
        self.phase = phase
        self.timeout_s = timeout_s


class PeerLost(Unavailable):
    """The connection to a peer was closed or reset, or was silent for too long."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(f"lost peer {peer_id}: {reason}")
        self.peer_id = peer_id
        self.reason = reason


class DialReason(enum.Enum):
    """Why an address could not be dialled, in the words shown to people."""

    REFUSED = "connection refused: nothing listens on that port"
    TIMED_OUT = "timed out: no answer"
    UNREACHABLE = "network unreachable"
    NAME_NOT_FOUND = "the host name does not resolve"
    WRONG_IDENTITY = "another identity answered: the peer has a new key, or another one has its address now"
    PROTOCOL_VERSION = "it speaks another protocol version"
    NOT_MANYHANDS = "not a manyhands peer"
    ITSELF = "the address is this peer itself"
    HELD_BACK = "not dialled: the rules for addresses that other peers name exclude it"
    REJECTED = "the peer refused the connection"


class DialFailed(Unavailable):
    """One address could not be reached."""

    def __init__(self, address: str, reason: DialReason, detail: str = "") -> None:
        super().__init__(f"{address}: {reason.value}" + (f" ({detail})" if detail else ""))
        self.address = address
        self.reason = reason
        self.detail = detail


class JoinFailed(Unavailable):
    """None of the initial peers could be reached; ``failures`` has one :class:`DialFailed` for each address."""

    def __init__(self, failures: Sequence[DialFailed]) -> None:
        if len(failures) == 1:
            super().__init__(f"the initial peer could not be reached: {failures[0]}")
        else:
            lines = "".join(f"\n  {failure}" for failure in failures)
            super().__init__(f"none of the {len(failures)} initial peers could be reached:{lines}")
        self.failures = list(failures)


class PeerError(ManyhandsError):
    """A peer did something wrong, or refused a request."""

    def __init__(self, peer_id: str, message: str) -> None:
        super().__init__(f"peer {peer_id}: {message}")
        self.peer_id = peer_id


class ProtocolViolation(PeerError):
    """A peer sent what the protocol does not allow."""


class BadSignature(PeerError):
    """A signature does not match the key of its owner."""


class Refused(PeerError):
    """A peer understood the request and refused it; ``code`` is stable and for programs."""

    def __init__(self, peer_id: str, code: str, message: str) -> None:
        super().__init__(peer_id, f"refused ({code}): {message}")
        self.code = code
        self.message = message


class RoundAborted(ManyhandsError):
    """An averaging round did not commit; no value was changed.

    Attributes:
        reason: what went wrong, in words.
        blamed: peer ids of the members that caused it; may be empty.
    """

    def __init__(self, reason: str, blamed: Sequence[str] = ()) -> None:
        unnamed = [peer_id for peer_id in blamed if peer_id not in reason]
        super().__init__(reason + (f" (because of {', '.join(unnamed)})" if unnamed else ""))
        self.reason = reason
        self.blamed = list(blamed)


class NothingToAverage(RoundAborted):
    """All members of a group gave a weight of 0, so that there is no mean."""


class NobodyThere(RoundAborted):
    """All expected peers are gone, at another round, or do not come to this one."""


class TooSlow(RoundAborted):
    """The members' lines cannot carry the round in its time; the reason has the figures, and what to change."""


class RankLost(ManyhandsError):
    """Another process of the same peer is gone, did not join a collective call, or failed."""
