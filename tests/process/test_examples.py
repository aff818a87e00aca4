"""The programs in examples/ do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

import manyhands
from tests.process.commands import LOOPBACK, Command

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWS = {
    "quickstart.py": ": 2 peers, loss",
    "averaging.py": "averaged by 2 peers",
    "evaluate.py": "held-out loss",
    "fsdp.py": ": 2 peers, loss",
    "local_steps.py": ": 2 peers, loss",
    "several_gpus.py": ": 2 peers, loss",
    "transformers_trainer.py": "'num_peers': 2",
}
"""What each program prints when two peers work together."""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STARTED_BY = {"fsdp.py": TORCHRUN, "several_gpus.py": TORCHRUN}


TOGETHER = [name for name in SHOWS if name != "evaluate.py"]
"""The programs that work with a second copy of themselves."""


def start(name: str, *arguments: str) -> Command:
    return Command([*STARTED_BY.get(name, []), str(EXAMPLES / name), *arguments], module=None)


def test_every_example_is_tested_and_short() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SHOWS, "hub_login.py"}  # tests/unit/access has that one
    for name in SHOWS:
        assert len((EXAMPLES / name).read_text().splitlines()) < 30


@pytest.mark.long
@pytest.mark.parametrize("name", TOGETHER)
def test_two_peers_run_each_example(name: str) -> None:
    first = start(name)
    second = None
    try:
        addresses = first.wait_for("others join with").split(f"{name} ")[1].split()
        second = start(name, *addresses)
        first.wait_for(SHOWS[name])
        second.wait_for(SHOWS[name])
    finally:
        first.close()
        if second is not None:
            second.close()


@pytest.mark.long
def test_the_program_on_the_page_runs_until_somebody_has_typed_its_line_and_ends_quietly(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "start" / "your-model.md").read_text()
    (tmp_path / "train.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    first = Command(["train.py"], module=None, folder=tmp_path)
    second = None
    try:
        addresses = first.wait_for("others join with").split("train.py ")[1].split()
        first.wait_for("step 3, ")
        second = Command(["train.py", *addresses], module=None, folder=tmp_path)
        second.wait_for("peers 2, loss")
        second.interrupt()
        assert second.wait() == 0
        assert "Traceback" not in second.output
        first.wait_for("peers 1, loss")
    finally:
        first.close()
        if second is not None:
            second.close()


@pytest.mark.long
def test_a_run_is_evaluated_by_a_peer_that_is_not_in_it_and_was_there_before_it() -> None:
    with manyhands.Peer(listen=[LOOPBACK]) as peer:
        evaluator = start("evaluate.py", *peer.addresses)
        trainer = None
        try:
            evaluator.wait_for("nobody trains run 'quickstart': no settings of it were found at the 1 peer")
            trainer = start("quickstart.py", *peer.addresses)
            evaluator.wait_for("held-out loss")
        finally:
            evaluator.close()
            if trainer is not None:
                trainer.close()


@pytest.mark.long
def test_a_peer_of_several_processes_that_cannot_join_ends_all_of_them() -> None:
    """Rank 0 fails before the others know of it; they wait for it, and torchrun ends them."""
    program = start("several_gpus.py", "/ip4/127.0.0.1/tcp/1")
    try:
        program.wait_for("JoinFailed: the initial peer could not be reached")
        assert program.wait() == 1
    finally:
        program.close()
