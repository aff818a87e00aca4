"""A command leaves on a signal, whatever its main thread does at that moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.cli import leaving
from manyhands.cli.leaving import leaving_on_signals
from tests.machine import Machine


class InterruptedFinalizer:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def make_and_forget(kind: type) -> None:
    kind()


def leave_in_a_finalizer() -> None:
    make_and_forget(InterruptedFinalizer)  # Python discards what its finalizer raises
    time.sleep(4)  # the last resort ends the process after 4.5 s


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_within_a_finalizer_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with Machine() as machine, pytest.raises(KeyboardInterrupt), leaving_on_signals():
        leave_in_a_finalizer()
    assert time.monotonic() - began < machine.allows(3.5)
    assert "Traceback" not in capfd.readouterr().err


def leave_slowly(announced: threading.Event) -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        assert announced.wait(4.0)  # the last resort ends the process after 4.5 s


def test_an_end_that_takes_a_while_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    announced = threading.Event()
    monkeypatch.setattr(leaving, "SAY_AFTER_S", 0.0)
    monkeypatch.setattr("os.isatty", lambda file: True)
    monkeypatch.setattr("os.write", lambda file, text: announced.set())
    with pytest.raises(KeyboardInterrupt), leaving_on_signals():
        leave_slowly(announced)


class FaultyFinalizer:
    def __del__(self) -> None:
        raise ValueError("of a user")


def test_other_faults_of_finalizers_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr("sys.unraisablehook", lambda event: reported.append(event.exc_type))
    with leaving_on_signals():
        make_and_forget(FaultyFinalizer)
    assert reported == [ValueError]


def test_the_exit_does_not_visit_all_objects_and_runs_all_hooks(tmp_path: Path) -> None:
    """A trainer has more than a million of them: the collections of Python's exit take seconds."""
    (tmp_path / "ends.py").write_text(
        "import atexit, gc, manyhands.cli.main, manyhands.cli.entry\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000))\n"  # hooks run from the last one to the first
        "manyhands.cli.main.run = lambda arguments: atexit.register(print, 'hook') and 7\n"
        "manyhands.cli.entry.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ends"], cwd=tmp_path, timeout=60, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (7, ["hook", "True"]), done.stderr


def ended(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """A program whose command has this body."""
    (folder / "ends.py").write_text(
        "import atexit, os, signal, time, manyhands.cli.main, manyhands.cli.entry\n"
        "from manyhands.cli.leaving import at_exit, skip_libraries_at_exit\n"
        f"def run(arguments):\n{textwrap.indent(body, '    ')}\n"
        "manyhands.cli.main.run = run\n"
        "manyhands.cli.entry.main()\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "ends"], cwd=folder, timeout=60, capture_output=True, text=True, check=False
    )


def test_a_library_that_waits_at_the_exit_is_skipped_and_all_else_is_done(tmp_path: Path) -> None:
    done = ended(
        tmp_path,
        "at_exit(lambda: print('undone'))\n"
        "atexit.register(time.sleep, 600.0)\n"
        "skip_libraries_at_exit()\n"
        "print('card')\n"
        "return 7",
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (7, ["card", "undone"], "")


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_another_ctrl_c_while_the_program_ends_ends_it_at_once_without_a_traceback(tmp_path: Path) -> None:
    done = ended(
        tmp_path,
        "atexit.register(time.sleep, 600.0)\natexit.register(os.kill, os.getpid(), signal.SIGINT)\nreturn 130",
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_interrupt_within_exec_of_text_ends_with_the_exit_code_too(tmp_path: Path) -> None:
    """Dataclasses are made so, many of them in the imports of large libraries.

    Python would end the process by SIGINT at its exit, if it runs a module (``python -m manyhands``).
    """
    (tmp_path / "interrupted.py").write_text(
        "import manyhands.cli.main, manyhands.cli.entry\n"
        "manyhands.cli.main.run = lambda arguments: exec('raise KeyboardInterrupt')\n"
        "manyhands.cli.entry.main()\n"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, timeout=60)
    assert done.returncode == 130


def test_libraries_are_skipped_at_the_exit_only_while_they_must_be(tmp_path: Path) -> None:
    done = ended(
        tmp_path, "atexit.register(print, 'library')\nskip_libraries_at_exit(lambda: False)\nprint('card')\nreturn 7"
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (7, ["card", "library"], "")
