"""The options of other tutorials reach the parts that they configure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli import old_names, train_command
from manyhands.cli.main import app, run
from manyhands.cli.old_names import ANY, JOIN, TABLE, TRAIN, OldName, Translation

HERE = "/ip4/127.0.0.1/tcp/0"
USAGE = 2


class Taken:
    """What a command was about to do.

    Attributes:
        given: settings of the recipe.
    """

    def __init__(self) -> None:
        self.run_id = ""
        self.network: Any = None
        self.training: Any = None
        self.given: dict[str, Any] = {}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taken]:
    """Commands that end where they would begin."""
    found = Taken()

    def take_part(run_id: str, network: Any, training: Any, given: dict[str, Any], *rest: Any, **more: Any) -> None:
        found.run_id, found.network, found.training, found.given = run_id, network, training, given

    monkeypatch.setattr(train_command, "take_part", take_part)
    return found


Get = Callable[[Taken], Any]

REACHES: list[tuple[str, Get, Any]] = [
    ("--experiment_prefix my-albert", lambda t: t.run_id, "my-albert"),
    ("--dht_listen_on [::]:*", lambda t: t.network.listen, ("[::]:*",)),
    ("--listen_on 0.0.0.0:*", lambda t: t.network.listen, ("0.0.0.0:*",)),
    (f"--host_maddrs {HERE} /ip4/127.0.0.2/tcp/0", lambda t: t.network.listen, (HERE, "/ip4/127.0.0.2/tcp/0")),
    ("--announce_maddrs /ip4/1.2.3.4/tcp/5", lambda t: t.network.announce, ("/ip4/1.2.3.4/tcp/5",)),
    ("--endpoint 1.2.3.4:5", lambda t: t.network.announce, ("1.2.3.4:5",)),
    ("--address 1.2.3.4:5", lambda t: t.network.announce, ("1.2.3.4:5",)),
    ("--identity_path me.key", lambda t: t.network.identity, Path("me.key")),
    ("--client_mode", lambda t: t.network.client_mode, True),
    ("--client_mode False", lambda t: t.network.client_mode, False),
    ("--averaging_expiration 10", lambda t: t.training.tuning.averaging().matchmaking_time_s, 10.0),
    ("--matchmaking_time 7", lambda t: t.training.tuning.averaging().matchmaking_time_s, 7.0),
    ("--averaging_timeout 40", lambda t: t.training.tuning.averaging().averaging_timeout_s, 40.0),
    ("--bandwidth 100", lambda t: t.training.tuning.averaging().bandwidth_mbit_s, 100.0),
    ("--target_group_size 64", lambda t: t.given["max_group_size"], 64),
    ("--statistics_expiration 120", lambda t: t.training.tuning.metrics_ttl_s, 120.0),
    ("--metadata_expiration 120", lambda t: t.training.tuning.progress().ttl_s, 120.0),
    ("--min_refresh_period 1", lambda t: t.training.tuning.progress().min_refresh_s, 1.0),
    ("--max_refresh_period 20", lambda t: t.training.tuning.progress().max_refresh_s, 20.0),
    ("--target_batch_size 4096", lambda t: t.given["target_batch_size"], 4096),
    ("--per_device_train_batch_size 4", lambda t: t.given["batch_size"], 4),
    ("--gradient_accumulation_steps 2", lambda t: t.training.gradient_accumulation_steps, 2),
    ("--seq_length 512", lambda t: t.given["seq_length"], 512),
    ("--learning_rate 0.00176", lambda t: t.given["learning_rate"], 0.00176),
    ("--weight_decay 0.02", lambda t: t.given["weight_decay"], 0.02),
    ("--warmup_steps 5000", lambda t: t.given["warmup_steps"], 5000),
    ("--total_steps 125000", lambda t: t.given["total_steps"], 125_000),
    ("--adam_epsilon 1e-5", lambda t: t.given["adam_epsilon"], 1e-5),
    ("--max_grad_norm 2", lambda t: t.given["max_grad_norm"], 2.0),
    ("--clamp_value 100", lambda t: t.given["clamp_value"], 100.0),
    ("--seed 42", lambda t: t.given["seed"], 42),
    ("--fp16", lambda t: t.training.precision, "float16"),
    ("--fp16 True", lambda t: t.training.precision, "float16"),
    ("--fp16 False", lambda t: t.training.precision, "float32"),
    ("--bf16", lambda t: t.training.precision, "bfloat16"),
    ("--delay_grad_averaging", lambda t: t.training.delay, "gradients"),
    ("--delay_optimizer_step True", lambda t: t.training.delay, "optimizer"),
    ("--delay_optimizer_step True --delay_grad_averaging True", lambda t: t.training.delay, "gradients"),
    ("--delay_grad_averaging False --delay_optimizer_step", lambda t: t.training.delay, "optimizer"),
    ("--output_dir ./outputs", lambda t: t.training.checkpoint_dir, Path("outputs")),
    ("--save_steps 500", lambda t: t.training.checkpoint_every, 500),
    ("--save_total_limit 5", lambda t: t.training.keep_checkpoints, 5),
    ("--max_steps 1000000", lambda t: t.training.max_steps, 1_000_000),
    ("--logging_steps 100", lambda t: t.training.log_every, 100),
    ("--logging_first_step", lambda t: t.training.log_first_batch, True),
    ("--config_path albert-large-v2", lambda t: t.given["num_hidden_layers"], 24),
]


@pytest.mark.parametrize(("words", "get", "expected"), REACHES, ids=[words.split()[0] for words, _, _ in REACHES])
def test_an_option_of_the_trainer_reaches_its_part(taken: Taken, words: str, get: Get, expected: Any) -> None:
    assert run(["train", *words.split()]) == 0
    assert get(taken) == expected


@pytest.mark.parametrize("row", [row for row in TABLE if JOIN in row.commands and row.new], ids=lambda row: row.old[0])
def test_join_has_the_options_that_old_names_translate_to(row: OldName) -> None:
    known = {name for argument in app["join"].assemble_argument_collection() for name in argument.names}
    assert row.new.split()[0] in known


def test_all_that_trainers_take_is_tested() -> None:
    rows = {name for row in TABLE for name in row.old if TRAIN in row.commands and row.new}
    elsewhere = {"logging_dir", "tokenizer_path", "model_config_path"}
    assert rows - elsewhere <= {words.split()[0].removeprefix("--") for words, _, _ in REACHES}


def test_old_options_are_read_with_equals_signs_dashes_and_underscores(taken: Taken) -> None:
    assert run(["train", "--experiment-prefix=x", "--averaging_expiration=9", "--fp16=False"]) == 0
    assert (taken.run_id, taken.training.precision) == ("x", "float32")
    assert taken.training.tuning.matchmaking_time_s == 9.0


@pytest.mark.parametrize("command", ANY)
def test_old_options_without_effect_are_noted_with_the_reason(command: str) -> None:
    for row in (row for row in TABLE if command in row.commands and not row.new):
        for name in row.old:
            translation = Translation([command, f"--{name}", "1"])
            assert translation.words == [command]
            assert translation.notes == [f"--{name} does nothing here: {row.why}"]


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("--store_checkpoints", "--checkpoint-dir checkpoints"),
        ("--store_checkpoints True --repo_path out", "--checkpoint-dir out"),
        ("--checkpoint-dir out --store_checkpoints", "--checkpoint-dir out"),
        ("--store_checkpoints False", ""),
        ("--save_checkpoint_step_interval 7", "--checkpoint-every 7"),
        ("--upload_interval None", ""),
    ],
)
def test_old_options_of_the_monitor_are_translated(words: str, now: str) -> None:
    translation = Translation(["monitor", *words.split()])
    assert translation.words == ["monitor", *now.split()]
    assert translation.notes == []


def test_of_two_precisions_the_one_that_is_not_false_counts(taken: Taken) -> None:
    assert run(["train", "--fp16", "False", "--bf16", "True"]) == 0
    assert taken.training.precision == "bfloat16"


def test_an_environment_variable_without_effect_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVEMIND_THREADS", "256")
    assert Translation(["train"]).notes == [
        "HIVEMIND_THREADS does nothing here: the network has one thread, and needs no more"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--experiment_prefix a --run-id a",
            "--experiment_prefix and --run-id are one option here; give --run-id once",
        ),
        ("--run_id a --experiment_prefix a", "--run_id and --experiment_prefix are one option here"),
        ("--averaging_expiration 5 --matchmaking_time 5", "give --matchmaking-time-s once"),
        ("--fp16 --precision float32", "--fp16 and --precision are one option here"),
        ("--fp16 perhaps", "--fp16 perhaps: it is True or False"),
        ("--address 1.2.3.4", "write --announce 1.2.3.4:PORT"),
        ("--config_path no-such-model", "give small or albert-large-v2, or a config.json"),
        ("--max_refresh_period 30", "for example with --progress-ttl-s 120"),
        ("--averaging_expiration 70", "averaging_expiration=70"),
        ("--save_total_limit 0", "save_total_limit is 0; it must be at least 1"),
        ("--output_dir o --no_checkpoints", "no_checkpoints and output_dir contradict each other"),
        ("--per_device_train_batch_size many", "--per_device_train_batch_size is 'many'; it must be a whole number"),
    ],
)
def test_conflicting_and_malformed_old_options_are_refused_in_one_line(
    taken: Taken, capfd: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert run(["train", *words.split()]) == USAGE
    errors = capfd.readouterr().err
    assert message in errors
    assert len(errors.strip().splitlines()) == 1, errors
    assert taken.run_id == ""


def test_an_error_names_the_option_as_it_was_written_and_leaves_commands_alone() -> None:
    translation = Translation(["train", "--output-dir", "o", "--tokenizer_path", "t", "--dht_listen_on", "31337"])
    message = (
        "checkpoint o/checkpoint-dir is of run 'a': name another --checkpoint-dir, whose checkpoint_dir keeps "
        "--checkpoint-directory; leave out --tokenizer: the tokenizer of the run is here, or: manyhands doctor "
        "--listen 31337"
    )
    assert translation.as_typed(message) == (
        "checkpoint o/checkpoint-dir is of run 'a': name another --output-dir, whose output-dir keeps "
        "--checkpoint-directory; leave out --tokenizer_path: the tokenizer of the run is here, or: manyhands doctor "
        "--listen 31337"
    )


def test_overwrite_output_dir_is_noted_with_how_to_begin_anew(taken: Taken, capfd: pytest.CaptureFixture[str]) -> None:
    run(["train", "--output_dir", "o", "--overwrite_output_dir"])
    assert "--overwrite_output_dir does nothing here: training goes on from the newest" in capfd.readouterr().err
    assert taken.training.checkpoint_dir == Path("o")


def test_the_docs_have_the_table_of_old_names() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "old-names.md"
    assert old_names.as_markdown() in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ANY)
def test_help_lists_the_old_names(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([command, "--help"])
    shown = capsys.readouterr().out
    for row in (row for row in TABLE if command in row.commands):
        assert all(f"--{name}" in shown for name in row.old)
