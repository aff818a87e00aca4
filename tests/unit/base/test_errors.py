"""Messages are for people: each names the value or the peer, the rule or the reason, and what to do."""

import asyncio
import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.averaging.codecs.codec import NotFinite
from manyhands.base import errors
from manyhands.base.errors import (
    BadSignature,
    ConfigError,
    DialFailed,
    DialReason,
    JoinFailed,
    ManifestMismatch,
    ManyhandsError,
    MissingExtra,
    NobodyThere,
    PeerError,
    PeerLost,
    ProtocolViolation,
    RankLost,
    Refused,
    RoundAborted,
    Timeout,
    Unavailable,
)

ROOT = Path(__file__).parents[3]
MESSAGES = [
    (
        MissingExtra("manyhands.Optimizer", "torch"),
        f"manyhands.Optimizer needs packages that are not installed; try: pip install '.[torch]' in {ROOT}",
    ),
    (
        ManifestMismatch("my-run", ["lr: 0.1 here, 0.2 in the run", "shape of w: [2] here, [3] in the run"]),
        "this peer does not fit run 'my-run': lr: 0.1 here, 0.2 in the run; shape of w: [2] here, [3] in the run",
    ),
    (
        Timeout("waiting for the state from 12D3KooWA", 2.5),
        "timed out after 2.5 s waiting for the state from 12D3KooWA",
    ),
    (Timeout("waiting for a group", 1200), "timed out after 1200 s waiting for a group"),
    (PeerLost("12D3KooWA", "no heartbeat for 10 s"), "lost peer 12D3KooWA: no heartbeat for 10 s"),
    (
        DialFailed("/ip4/10.0.0.1/tcp/80", DialReason.REFUSED),
        "/ip4/10.0.0.1/tcp/80: connection refused: nothing listens on that port",
    ),
    (
        DialFailed("/dns/a/tcp/80", DialReason.WRONG_IDENTITY, "12D3KooWB"),
        "/dns/a/tcp/80: another identity answered: the peer has a new key, or another one has its address now "
        "(12D3KooWB)",
    ),
    (Refused("12D3KooWA", "busy", "try again later"), "peer 12D3KooWA: refused (busy): try again later"),
    (ProtocolViolation("12D3KooWA", "frame of 2 GiB"), "peer 12D3KooWA: frame of 2 GiB"),
    (RoundAborted("no majority"), "no majority"),
    (
        RoundAborted("two members were lost", ["12D3KooWA", "12D3KooWB"]),
        "two members were lost (because of 12D3KooWA, 12D3KooWB)",
    ),
    (RoundAborted("12D3KooWA was lost before it voted", ["12D3KooWA"]), "12D3KooWA was lost before it voted"),
]


@pytest.mark.parametrize(("error", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_each_error_has_its_full_message(error: ManyhandsError, message: str) -> None:
    assert str(error) == message


COPIES: list[Callable[[Exception], Exception]] = [
    copy.copy,
    copy.deepcopy,
    lambda error: pickle.loads(pickle.dumps(error)),
    lambda error: pickle.loads(pickle.dumps(error, protocol=0)),
]
OTHER_KINDS = [
    ConfigError("x=1 must be 2"),
    NobodyThere("none of the 2 expected peers came", ["12D3KooWA"]),
    JoinFailed([DialFailed("/ip4/10.0.0.1/tcp/80", DialReason.REFUSED, "at once")]),
    RankLost("rank 1 is gone"),
    NotFinite("value 3 is not finite"),
]


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle", "pickle_0"])
@pytest.mark.parametrize("error", [*(error for error, _ in MESSAGES), *OTHER_KINDS], ids=lambda e: type(e).__name__)
def test_a_copied_or_pickled_error_has_the_same_message_and_attributes(
    error: ManyhandsError, copied: Callable[[Exception], Exception]
) -> None:
    """As after a process pool or a queue, which pickle the errors of their workers."""
    other = copied(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert other.args == error.args
    assert {name: repr(value) for name, value in vars(other).items()} == {
        name: repr(value) for name, value in vars(error).items()
    }


def test_join_failed_has_a_line_with_a_reason_for_each_address() -> None:
    failures = [
        DialFailed("/ip4/10.0.0.1/tcp/80", DialReason.REFUSED),
        DialFailed("/ip4/10.0.0.2/tcp/81", DialReason.TIMED_OUT),
    ]
    first, *lines = str(JoinFailed(failures)).splitlines()
    assert first == "none of the 2 initial peers could be reached:"
    assert lines == [f"  {failure}" for failure in failures]


def test_a_failure_to_join_by_one_address_is_one_line() -> None:
    failure = DialFailed("/ip4/10.0.0.1/tcp/80", DialReason.REFUSED)
    assert str(JoinFailed([failure])) == f"the initial peer could not be reached: {failure}"


def test_each_dial_reason_has_words_of_its_own() -> None:
    assert len({reason.value for reason in DialReason}) == len(list(DialReason)) == 10


@pytest.mark.parametrize(
    ("kind", "parents"),
    [
        (ConfigError, [ManyhandsError, ValueError]),  # code that catches ValueError for a bad argument goes on working
        (MissingExtra, [ConfigError]),
        (ManifestMismatch, [ConfigError]),
        (Timeout, [Unavailable]),
        (PeerLost, [Unavailable]),
        (DialFailed, [Unavailable]),
        (JoinFailed, [Unavailable]),
        (BadSignature, [PeerError]),
        (ProtocolViolation, [PeerError]),
        (Refused, [PeerError]),
        (RoundAborted, [ManyhandsError]),
        (RankLost, [ManyhandsError]),
    ],
)
def test_each_error_has_its_parents_in_the_tree(kind: type[Exception], parents: list[type[Exception]]) -> None:
    assert [parent for parent in parents if not issubclass(kind, parent)] == []


def test_each_error_has_its_entry_in_the_documentation() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    classes = re.compile(r"^class ([A-Z]\w+)\(([\w., ]+)\):", re.MULTILINE)
    found = [match for source in sources for match in classes.findall(source)]
    kinds, num_before = {"ManyhandsError"}, 0
    while num_before < len(kinds):
        num_before = len(kinds)
        kinds |= {name for name, parents in found if kinds.intersection(parents.split(", "))}
    path, _, anchor = Timeout("waiting", 1.0).entry.partition("#")
    entries = re.findall(r"^### (\w+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(entries) == sorted(kinds)
    assert anchor in [entry.lower() for entry in entries], "as mkdocs makes anchors of headings"


def test_the_base_class_is_never_raised_itself() -> None:
    """So that code can tell what kind of error it has caught."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")}
    assert [
        path.name for path, source in sources.items() if re.search(r"(?<!class )\bManyhandsError\([^)]", source)
    ] == []


def test_our_timeout_is_no_asyncio_timeout() -> None:
    """So that an outer ``asyncio.timeout`` and ours cannot be taken for each other."""
    assert not issubclass(Timeout, (TimeoutError, asyncio.TimeoutError))


def test_an_installed_package_names_the_one_on_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "__file__", "/usr/lib/python3/site-packages/manyhands/base/errors.py")
    assert str(MissingExtra("this", "albert")).endswith("try: pip install 'manyhands[albert]'")
