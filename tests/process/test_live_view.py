"""What a volunteer sees of a trainer in a terminal and in a pipe, and the model that it leaves."""

from __future__ import annotations

import random
import re
import signal
import sys
from pathlib import Path

import pytest

from manyhands.cli.main import run
from tests.process.commands import LOOPBACK, running
from tests.process.terminals import final_rows, in_terminal

pytestmark = pytest.mark.process

INTERRUPTED, USAGE = 130, 2
LINE = r"Step \d+: \d+/64 samples \x1b"  # then comes the bar, in colors
WORDS = ("the", "a", "dog", "house", "river", "city", "capital", "of", "france", "is", "was", "big", "runs", "over")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small corpus."""
    rng = random.Random(0)
    sentences = [" ".join(rng.choices(WORDS, k=9)).capitalize() + "." for _ in range(1200)]
    documents = [" ".join(sentences[start : start + 12]) for start in range(0, len(sentences), 12)]
    path = tmp_path / "small.txt"
    path.write_text("\n\n".join(documents))
    return path


def arguments(text: Path, *more: str, target_batch_size: int = 64) -> tuple[str, ...]:
    return (
        "train", "--run-id", "seen", "--listen", LOOPBACK, "--threads", "1", "--device", "cpu", "--batch-size", "8",
        "--hidden-size", "32", "--num-hidden-layers", "1", "--intermediate-size", "32", "--embedding-size", "16",
        "--vocab-size", "512", "--seq-length", "16", "--linger-s", "0",
        "--target-batch-size", str(target_batch_size), "--text", str(text), *more,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="it has no pseudo-terminals")
def test_a_terminal_has_one_live_line_and_scrolls_events(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    with in_terminal(*arguments(text, "--checkpoint-dir", str(folder), "--slow-down", "10")) as terminal:
        terminal.wait_until(r"Optimizer step: done! Step 3")
        terminal.wait_until(rf"\r\x1b\[2K{LINE}", times=3)
        terminal.send(signal.SIGINT)
        assert terminal.wait() == INTERRUPTED, terminal.screen
    rows = final_rows(terminal.screen)
    first, *_, last = re.finditer(LINE, terminal.screen)
    drawn = terminal.screen[first.end() : last.start()]
    assert not re.search("Collaboration accumulated|Local loss|Beginning global", drawn), "the line says it"
    assert not [row for row in rows if "/64 samples" in row], "the line was drawn again and again, and is gone"
    steps = [int(match[1]) for row in rows if (match := re.search(r"\[INFO\] Optimizer step: done! Step (\d+)", row))]
    assert steps == list(range(1, steps[-1] + 1))
    card = "\n".join(rows[rows.index(next(row for row in rows if "Your part in run 'seen'" in row)) :])
    assert re.search(rf"steps +{steps[-1]} global steps with you; the run is at step {steps[-1]}", card), card
    assert "100.0% of all" in card
    assert re.search(r"held-out loss +\d\.\d+ before, \d\.\d+ after, on 64 samples", card), card
    assert f"{folder / f'checkpoint-{steps[-1]}'}" in card
    assert f'manyhands fill {folder} "The capital of [MASK] is ..."' in card

    assert run(["fill", str(folder), "The capital of [MASK] is [MASK]."]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("The capital of ")
    assert "[MASK]" not in said[0]
    assert sum(bool(re.fullmatch(r" +\d+\.\d% {2}\S+", line)) for line in said) == 2 * 5
    assert run(["fill", str(folder / f"checkpoint-{steps[-1]}"), "a [MASK]"]) == 0
    assert run(["fill", str(folder), "[MASK] " * 20]) == USAGE
    assert "tokens, and this model reads 16 at most" in capsys.readouterr().err


@pytest.mark.long
def test_a_pipe_has_plain_lines_and_the_card(text: Path) -> None:
    with running(*arguments(text, "--no-checkpoints", "--slow-down", "3")) as trainer:
        for words in (
            "Collaboration accumulated 0 samples from 1 peer; ETA unknown (refresh in ",
            "[INFO] Optimizer step: done! Step 1, ",
            "[INFO] Step 1",
            "[INFO] Your current contribution: ",
            "[INFO] Local loss: ",
            "Step 2",
        ):
            trainer.wait_for(words)
        trainer.terminate()
        assert trainer.wait() == INTERRUPTED, trainer.output
    assert "Your part in run 'seen'" in trainer.output
    assert "not saved, as --no-checkpoints says" in trainer.output
    assert "manyhands fill" not in trainer.output
    assert "\x1b" not in trainer.output
    assert "Traceback" not in trainer.output


@pytest.mark.long
def test_the_steps_of_two_peers_have_one_numbering_and_shares(text: Path, tmp_path: Path) -> None:
    common = arguments(text, "--no-checkpoints", "--slow-down", "5", target_batch_size=512)
    with running("monitor", "--run-id", "seen", "--listen", LOOPBACK) as monitor:
        address = monitor.wait_for("manyhands train").split()[-1]
        with running(*common, "--initial-peers", address, "--start-new") as first:
            first.wait_for("Collaboration accumulated")
            with running(*common, "--initial-peers", address) as second:
                line = second.wait_for("Beginning global optimizer step #")
                number = int(line.rpartition("#")[2])
                assert f"Step {number}," in second.wait_for("Optimizer step: done!")
                seen = 0
                while seen < number:  # it may look too late for the line of a step, and has that of a later one
                    seen = int(monitor.wait_for("  loss = ").partition("Step #")[2].split()[0])
                if seen > number:
                    second.wait_for(f"Optimizer step: done! Step {seen},")
                second.interrupt()
                assert second.wait() == INTERRUPTED, second.output
            first.interrupt()
            assert first.wait() == INTERRUPTED, first.output
    (used, share, total) = re.findall(r"samples +(\d+) of yours, ([\d.]+)% of all (\d+)", second.output)[0]
    assert 0 < int(used) < int(total)
    assert float(share) == pytest.approx(100 * int(used) / int(total), abs=0.1)
