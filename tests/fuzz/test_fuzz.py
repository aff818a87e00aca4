"""A short run of all fuzz targets, always with the same inputs; ``make fuzz`` does more, with others."""

from __future__ import annotations

import importlib
import time
from itertools import islice
from pathlib import Path

import msgspec
import pytest

import manyhands
from manyhands.base.errors import ConfigError, ProtocolViolation
from manyhands.rpc import Method
from tests.fuzz.__main__ import main
from tests.fuzz.runner import CORPUS, Session, corpus_of, inputs_of
from tests.fuzz.target import MAX_CPU_S, Target, decoded, fault_in
from tests.fuzz.targets import TARGETS

NUM_INPUTS = 500  # for a target of weight 1: all together take 5 s
SEED = 1


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_taken(name: str) -> None:
    target = TARGETS[name]
    for data in islice(inputs_of(target, SEED), len(target.seeds)):
        assert fault_in(target, data) is None


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_cause_no_fault(name: str) -> None:
    session = Session(TARGETS[name], SEED)
    session.feed(int(NUM_INPUTS * session.target.weight))
    if session.finding is not None:
        path = session.finding.save(Path("build/fuzz"))
        pytest.fail(f"{session.finding.fault}\npython -m tests.fuzz --target {name} --replay {path}", pytrace=False)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*.bin")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_inputs_that_once_failed_fail_no_more(path: Path) -> None:
    target = TARGETS[path.parent.name]
    assert path in corpus_of(target)
    assert fault_in(target, path.read_bytes()) is None
    assert fault_in(target, path.read_bytes(), traced=True) is None


def test_every_call_has_a_target() -> None:
    methods = set()
    for path in Path(manyhands.__path__[0]).rglob("[!_]*.py"):
        if "recipes" not in path.parts and "Method" in path.read_text():
            name = ".".join(path.relative_to(Path(manyhands.__path__[0]).parent).with_suffix("").parts)
            found = vars(importlib.import_module(name)).values()
            methods |= {method.name for method in found if isinstance(method, Method)}
    assert len(methods) >= 7
    assert {f"{name}.{part}" for name in methods for part in ("request", "response")} <= TARGETS.keys()


def test_the_same_seed_gives_the_same_inputs() -> None:
    for target in TARGETS.values():
        assert list(islice(inputs_of(target, 7), 30)) == list(islice(inputs_of(target, 7), 30))


# the tool itself


class Pair(msgspec.Struct):
    number: int
    text: str


def fragile(data: bytes) -> None:
    if decoded(data, Pair).number < 0:
        raise KeyError("below zero")


def greedy(data: bytes) -> None:
    assert len(bytearray(len(data) << 20))


def busy(data: bytes) -> None:
    began = time.thread_time()
    while time.thread_time() < began + 1.05 * MAX_CPU_S:
        pass


def talkative(data: bytes) -> None:
    raise ProtocolViolation("x", "it wrote \x1b[2J")


def target_of(run: object) -> Target:
    seeds = [msgspec.msgpack.encode(Pair(7, "text"))]
    errors = (ProtocolViolation, ConfigError)
    return Target(name="tried", seeds=seeds, run=run, errors=errors, max_bytes=1 << 20)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "traced", "fault"),
    [
        (greedy, True, "MiB are allowed"),
        (busy, False, "s are allowed"),
        (talkative, False, "unprintable characters"),
        (fragile, False, None),
    ],
)
def test_memory_time_and_unprintable_messages_count_as_faults_and_expected_errors_do_not(
    run: object, traced: bool, fault: str | None
) -> None:
    target = target_of(run)
    found = fault_in(target, target.seeds[0], traced=traced)
    assert found is fault if fault is None else fault in str(found)


def test_a_finding_is_saved_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = {"tried": target_of(fragile)}
    assert main(["--seconds", "20", "--seed", "1"], targets, tmp_path) == 1
    (path,) = tmp_path.iterdir()
    said = capsys.readouterr().out
    assert "KeyError" in said
    assert f"--target tried --replay {path}" in said
    assert main(["--target", "tried", "--replay", str(path)], targets) == 1
    assert "below zero" in capsys.readouterr().out


def test_a_run_without_findings_reports_the_inputs_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0.1", "--target", "run-id"]) == 0
    assert "inputs tried" in capsys.readouterr().out
