"""The log in a file: the same lines as in the terminal, through rotation and a full disk."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from manyhands.cli.main import run
from manyhands.cli.output.live_view import live_line
from manyhands.cli.output.logs import log_to, name_in_logs
from manyhands.optim.run.progress import SHOWN_LIVE

logger = logging.getLogger("manyhands.test")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("manyhands")
    before, levels = root.handlers, (root.level, ours.level)
    yield
    for handler in root.handlers:
        if handler not in before:
            handler.close()
    root.handlers = before
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)


def objects_in(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_terminal_and_the_file_have_the_same_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    log_to(path, is_json=False, verbose=False)
    logger.info("step %d", 7)
    logger.debug("left out")
    logging.getLogger("another").info("left out too")
    assert re.fullmatch(r"\w{3} \d\d [\d:]{8}\.\d{3} \[INFO\] step 7\n", capsys.readouterr().out)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:]{8}\.\d{3} \[INFO\] step 7\n", path.read_text())


def test_json_lines_have_time_run_peer_and_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    log_to(path, is_json=True, verbose=False)
    logger.info("before")
    name_in_logs(run="r", peer="12D3")
    before = time.time()
    logger.warning("two\nlines, %s", "\udc80", extra={"step": 3, **SHOWN_LIVE, "message_of": Path("x")})
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    first, second, third = objects_in(path)
    assert first.keys() == {"time", "level", "logger", "message"}
    assert before - 0.01 < second.pop("time") < time.time() + 0.01  # type: ignore[operator]
    assert second == {
        "level": "WARNING", "logger": "manyhands.test", "message": "two\nlines, \\udc80",
        "run": "r", "peer": "12D3", "step": 3, "message_of": "x",
    }  # fmt: skip
    assert "ValueError: why" in str(third["traceback"])
    assert "{" not in capsys.readouterr().out, "people read the terminal"


def test_nobody_can_overwrite_what_a_line_says(tmp_path: Path) -> None:
    log_to(tmp_path / "log", is_json=True, verbose=False)
    logger.info("said", extra={"level": "NONE", "time": 0})
    (line,) = objects_in(tmp_path / "log")
    assert line["level"] == "INFO"
    assert line["time"] != 0


def test_a_rotated_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log_to(path, is_json=False, verbose=False)
    logger.info("old")
    path.rename(tmp_path / "log.1")
    logger.info("new")
    assert "old" in (tmp_path / "log.1").read_text()
    assert re.fullmatch(r".*\[INFO\] new\n", path.read_text())


def test_a_file_that_was_copied_and_cut_off_goes_on_at_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log_to(path, is_json=False, verbose=False)
    logger.info("old")
    with path.open("r+b") as file:
        file.truncate(0)  # as logrotate does for copytruncate
    logger.info("new")
    assert re.fullmatch(r".*\[INFO\] new\n", path.read_text())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device of this system is always full")
def test_a_full_disk_is_one_warning_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log_to(path, is_json=False, verbose=False)
    for number in range(3):
        logger.info("line %d", number)
    said = capsys.readouterr()
    assert said.out.count("No space left on device; log lines are dropped meanwhile") == 1
    assert said.out.count("[INFO] line") == 3
    assert not said.err
    path.unlink()
    logger.info("again")
    kept = path.read_text()
    assert "[INFO] again\n" in kept
    assert "is written again; 4 log lines are missing in it" in kept, "three, and the warning"


def test_threads_never_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log_to(path, is_json=True, verbose=False)

    def log(name: str) -> None:
        for number in range(50):
            logger.info("%s %d %s", name, number, name * 500)
            if name == "a" and number % 10 == 0:
                path.rename(path.with_suffix(f".{number}"))

    threads = [threading.Thread(target=log, args=[name]) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(objects_in(file)) for file in tmp_path.iterdir()) == 200


def test_a_second_call_closes_the_file_of_the_first(tmp_path: Path) -> None:
    for name in ("a", "b"):
        log_to(tmp_path / name, is_json=False, verbose=False)
        logger.info("to %s", name)
    assert "to b" not in (tmp_path / "a").read_text()
    assert "to b" in (tmp_path / "b").read_text()


def test_the_file_has_also_what_the_live_line_shows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log_to(path, is_json=False, verbose=False)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=40, legacy_windows=False)
    with live_line(console, lambda width: ""):
        logger.info("accumulated", extra=SHOWN_LIVE)
    assert "accumulated" in path.read_text()
    assert "accumulated" not in screen.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--log-file", "/no/such/folder/log"], "--log-file /no/such/folder/log: No such file or directory"),
        (["--log-file", "/"], "--log-file /: Is a directory"),
        (["--log-json"], "--log-json is about the lines of a log file; name one"),
    ],
)
def test_a_log_file_that_cannot_be_written_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["first-peer", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert not said.out


def test_all_commands_that_stay_take_a_log_file(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "join", "monitor", "first-peer", "evaluate"):
        assert run([command, "--help"]) == 0
        said = capsys.readouterr().out
        assert "--log-file" in said
        assert "--log-json" in said


def test_the_last_lines_go_to_standard_error_if_standard_output_is_closed() -> None:
    """As with ``| head``, and with ``| tee`` at Ctrl-C, which ends ``tee`` first: there were tracebacks instead."""
    program = """
import logging
from manyhands.cli.leaving import leaving_on_signals
from manyhands.cli.output.logs import log_to_stdout

log_to_stdout(verbose=False)
logger = logging.getLogger("manyhands.test")
with leaving_on_signals():
    try:
        logger.info("first")
        input()
        logger.info("second")
        while True:
            input()
    except KeyboardInterrupt:
        logger.info("saving")
        print("card")
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert "first" in process.stdout.readline()
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.flush()
        errors = process.stderr.read()
        assert process.wait() == 0
    assert [line.split("] ")[-1] for line in errors.splitlines()][-2:] == ["saving", "card"]
    assert "Traceback" not in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device of this system is always full")
def test_a_full_disk_under_standard_output_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        log_to(None, is_json=False, verbose=False)
        logger.info("one")
        logger.info("two")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what it still holds
    assert capsys.readouterr().err == (
        "manyhands: standard output: No space left on device; log lines are dropped meanwhile\n"
    )


def test_a_command_whose_output_nobody_reads_ends_without_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "manyhands", "notebook", "--run-id", "x", "--initial-peers", "8.8.8.8:31337"]
    ended = subprocess.run([*command, "--install", "x"], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")
