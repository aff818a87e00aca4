"""Options of other tutorials and of earlier versions, and their replacements here (docs/reference/old-names.md).

Each row of the table translates some options of some commands: to another name, to another way to write it, or to
nothing, with the reason. Options of the same name need no row. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.base.errors import ConfigError

Values = list[str]
Convert = Callable[[str, Values], Values]
"""Takes an old option, as it was written, and its values; returns the arguments that replace it."""

TRAIN = "train"
JOIN = "join"
MONITOR = "monitor"
FIRST_PEER = "first-peer"
EVALUATE = "evaluate"
AWS = "aws"
TRAINERS = (TRAIN, JOIN)
ANY = (*TRAINERS, MONITOR, FIRST_PEER, EVALUATE)

NOTHING = "None"
"""Options with this value are treated as not given."""
_TRUE = ("true", "1", "yes", "y", "t")
_FALSE = ("false", "0", "no", "n", "f")


@dataclass(frozen=True)
class OldName:
    """The translation of some old options.

    Attributes:
        old: the names in the tutorials, without leading dashes.
        new: the option to write now; empty for options that do nothing here.
        commands: the commands that this row applies to.
        why: shown in the help; printed for users of the old option if ``new`` is empty.
        convert: makes the new arguments; by default the new name with the same values.
        gives_way: whether the same option, given in another way, overrides this one instead of contradicting it.
    """

    old: tuple[str, ...]
    new: str
    commands: tuple[str, ...] = TRAINERS
    why: str = ""
    convert: Convert | None = None
    gives_way: bool = False

    def words(self, written: str, values: Values) -> Values:
        """The arguments that replace the option.

        Raises:
            ConfigError: its value cannot be used here.
        """
        if self.convert is not None:
            return self.convert(written, values)
        return [self.new, *values] if self.new else []


def _switch(on: Sequence[str], off: Sequence[str] = ()) -> Convert:
    """Converts an option that is true when present, or by its value."""

    def convert(written: str, values: Values) -> Values:
        return list(on if _is_true(written, values) else off)

    return convert


_CLIENT_MODE = _switch(["--client-mode"], ["--no-client-mode"])


def _is_true(written: str, values: Values) -> bool:
    text = values[0].lower() if values else "true"
    if len(values) > 1 or text not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{written} {' '.join(values)}: it is True or False, for example {written} True")
    return text in _TRUE


def _announced(written: str, values: Values) -> Values:
    """Reject hosts without a port: the oldest tutorials give the port in another option."""
    for value in values:
        if "/" not in value and ":" not in value:
            raise ConfigError(
                f"{written} {value} has no port; write --announce {value}:PORT, with the port of --listen"
            )
    return ["--announce", *values]


def _curves(written: str, values: Values) -> Values:
    """Write curves only if the package is installed, as the trainers of the tutorials do."""
    if importlib.util.find_spec("tensorboardX") is not None:
        return ["--tensorboard", *values]
    return []


TABLE = (
    OldName(("experiment_prefix",), "--run-id", (*TRAINERS, MONITOR, EVALUATE)),
    OldName(("experiment_prefix",), "", (FIRST_PEER,), "a first peer welcomes the peers of any run"),
    OldName(("dht_listen_on", "listen_on", "host_maddrs"), "--listen", ANY),
    OldName(("announce_maddrs", "endpoint", "address"), "--announce", ANY, "HOST:PORT or a multiaddr", _announced),
    OldName(("identity_path",), "--identity", ANY),
    OldName(("client_mode",), "--client-mode", (*TRAINERS, MONITOR, EVALUATE), convert=_CLIENT_MODE),
    OldName(("averaging_expiration", "matchmaking_time"), "--matchmaking-time-s"),
    OldName(("averaging_timeout",), "--averaging-timeout-s"),
    OldName(("bandwidth",), "--bandwidth-mbit-s", (*TRAINERS, AWS)),
    OldName(("target_group_size",), "--max-group-size", (TRAIN,), "set by the peer that begins the run"),
    OldName(("statistics_expiration",), "--metrics-ttl-s"),
    OldName(("metadata_expiration",), "--progress-ttl-s"),
    OldName(("min_refresh_period",), "--min-refresh-s"),
    OldName(("max_refresh_period",), "--max-refresh-s"),
    OldName(("per_device_train_batch_size",), "--batch-size"),
    OldName(
        ("fp16",), "--precision float16",
        convert=_switch(["--precision", "float16"], ["--precision", "float32"]),
    ),
    OldName(
        ("bf16",), "--precision bfloat16",
        convert=_switch(["--precision", "bfloat16"], ["--precision", "float32"]),
    ),
    OldName(("delay_grad_averaging",), "--delay gradients", convert=_switch(["--delay", "gradients"])),
    OldName(
        ("delay_optimizer_step",), "--delay optimizer", why="--delay_grad_averaging has precedence",
        convert=_switch(["--delay", "optimizer"]), gives_way=True,
    ),
    OldName(("offload_optimizer",), "", why="--delay keeps the optimizer's parameters on the host"),
    OldName(("delay_state_averaging",), "", why="only gradients are averaged"),
    OldName(("output_dir",), "--checkpoint-dir"),
    OldName(("overwrite_output_dir",), "", why="training goes on from the newest checkpoint in the folder; to begin "
            "anew, name another one: --output_dir NEW-FOLDER"),
    OldName(("save_steps",), "--checkpoint-every"),
    OldName(("save_total_limit",), "--keep-checkpoints"),
    OldName(
        ("logging_dir",), "--tensorboard",
        why="curves need TensorBoard's package: pip install 'manyhands[tensorboard]'", convert=_curves,
    ),
    OldName(("logging_steps",), "--log-every"),
    OldName(("logging_first_step",), "--log-first-batch", convert=_switch(["--log-first-batch"])),
    OldName(("tokenizer_path",), "--tokenizer", (*TRAINERS, EVALUATE)),
    OldName(("config_path", "model_config_path"), "--model", (TRAIN,), "albert-large-v2, small, or a config.json"),
    OldName(("target_group_size", "config_path", "model_config_path"), "", (JOIN,), "it comes from the run"),
    OldName(("save_checkpoint_step_interval",), "--checkpoint-every", (MONITOR,)),
    OldName(("store_checkpoints",), "--checkpoint-dir", (MONITOR,), "in ./checkpoints; needs torch",
            _switch(["--checkpoint-dir", "checkpoints"]), gives_way=True),
    OldName(("repo_path",), "--checkpoint-dir", (MONITOR,)),
    # options that have no meaning here
    OldName(("use_ipfs",), "", ANY, "peers meet through --initial-peers alone"),
    OldName(("use_google_dns",), "", (MONITOR, FIRST_PEER, EVALUATE), "--announce says what others should dial"),
    OldName(("default_refresh_period", "expected_drift_peers", "expected_drift_rate"), "",
            why="the others' progress is read in time without it"),
    OldName(("batch_size_lead",), "", why="all peers know the leader of the next step beforehand"),
    OldName(("backup_every_steps",), "", why="values that are not finite never reach the parameters"),
    OldName(("dataloader_num_workers",), "", why="batches are made in the trainer's own process"),
    OldName(("per_device_eval_batch_size",), "", why="held-out samples are computed a few at a time"),
    OldName(("do_train", "do_eval"), "", (*TRAINERS, EVALUATE), "a trainer trains; manyhands evaluate evaluates"),
    OldName(("fp16_opt_level",), "", why="--precision says what to compute in"),
    OldName(
        ("averaging_expiration", "matchmaking_time", "averaging_timeout", "bandwidth", "target_group_size",
         "target_batch_size", "batch_size_lead", "metadata_expiration", "statistics_expiration", "min_refresh_period",
         "max_refresh_period", "default_refresh_period", "expected_drift_peers", "expected_drift_rate", "seed",
         "config_path", "model_config_path", "backup_every_steps", "learning_rate", "total_steps", "warmup_steps",
         "seq_length", "per_device_train_batch_size", "per_device_eval_batch_size",
         "gradient_accumulation_steps", "fp16", "bf16", "logging_dir", "logging_steps", "logging_first_step"),
        "", (MONITOR, FIRST_PEER, EVALUATE), "set by the trainers of a run",
    ),
    OldName(("dataset_path", "cache_dir", "tokenizer", "tokenizer_path", "output_dir", "overwrite_output_dir"), "",
            (MONITOR, FIRST_PEER), "it trains nothing"),
    OldName(("output_dir", "overwrite_output_dir"), "", (EVALUATE,), "it keeps nothing"),
    OldName(
        ("run_id", "refresh_period", "wandb_project", "store_checkpoints", "save_checkpoint_step_interval", "repo_path",
         "repo_url", "upload_interval"),
        "", (FIRST_PEER,), "manyhands monitor does that, for one run",
    ),
    OldName(("no_watch",), "", (AWS,), "AWS replaces lost machines, and aws up returns when the first ones run"),
    OldName(("scripts",), "", (AWS,), "the template that --dry-run prints has the scripts of the machines"),
)  # fmt: skip
"""All old options of all commands."""

OLD_VARIABLES = {"HIVEMIND_THREADS": "the network has one thread, and needs no more"}
"""Environment variables that do nothing here, with the reason."""


class Translation:
    """A command line with old options replaced by new ones.

    Args:
        words: the command and its arguments.
    Attributes:
        words: the same, with new names.
        notes: a line for each option and variable that does nothing here.
        typed: new name -> the old one that the user wrote.
    Raises:
        ConfigError: an option is given by its old name and its new one, or its value cannot be used.
    """

    def __init__(self, words: Sequence[str]) -> None:
        command = words[0] if words else ""
        self.notes = [f"{name} does nothing here: {why}" for name, why in OLD_VARIABLES.items() if name in os.environ]
        rows = {name: row for row in TABLE if command in row.commands for name in row.old}
        parts: list[_ReplacedOption] = []
        for option, values, written in _options(words):
            row = rows.get(_plain(option)) if option else None
            if option and values == [NOTHING]:
                continue
            parts.append(_ReplacedOption(option, written if row is None else row.words(option, values), row, values))
        self.words = []
        self.typed = {part.words[0]: part.option for part in parts if part.row is not None and part.words}
        for part in parts:
            rivals = [other for other in parts if other is not part and part.name and other.name == part.name]
            if part.gives_way and rivals:
                continue
            for other in rivals:
                if (part.row or other.row) and not other.gives_way:
                    raise ConfigError(
                        f"{part.option} and {other.option} are one option here; "
                        f"give --{part.name.replace('_', '-')} once"
                    )
            if part.row is not None and not part.words and part.row.why and (not part.row.new or part.is_given):
                self.notes.append(f"{part.option} does nothing here: {part.row.why}")
            self.words += part.words

    def as_typed(self, message: str) -> str:
        """An error message with the names that the user wrote. Commands in it, after "manyhands", stay as they are."""
        before, command, after = message.partition("manyhands ")
        for new, old in self.typed.items():
            before = re.sub(rf"(?<![\w-]){new}(?![\w-])", old, before)
            plain = _plain(new)
            follows = r"(?![\w./-])" if "_" in plain else r"(?==)"  # a single word is prose, unless a value follows
            before = re.sub(rf"(?<![\w./-]){plain}{follows}", old.lstrip("-"), before)
        return before + command + after


class _ReplacedOption(NamedTuple):
    """An option, and the arguments that replace it."""

    option: str
    words: list[str]
    row: OldName | None
    values: Values

    @property
    def name(self) -> str:
        """Name of the replacing option; empty if there is none."""
        return _plain(self.words[0]).partition("=")[0] if self.option and self.words else ""

    @property
    def is_given(self) -> bool:
        """Whether a switch is on, or any other value was given."""
        return not self.values or self.values[0].lower() not in _FALSE

    @property
    def gives_way(self) -> bool:
        return self.row is not None and (self.row.gives_way or not self.is_given)


def _plain(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _options(words: Sequence[str]) -> Iterator[tuple[str, Values, list[str]]]:
    """Yield each option, its values, and all its words as written; words before the first option have an empty name."""
    option = ""
    values: list[str] = []
    written: list[str] = []
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            written.append(word)
            continue
        if written:
            yield option, values, written
        option, separator, value = word.partition("=")
        values = [value] if separator else []
        written = [word]
    if written:
        yield option, values, written


def help_of(command: str) -> str:
    """The part of a command's ``--help`` about old names; empty if it takes none."""
    lines = [f"  --{', --'.join(row.old)}: {_meaning(row)}" for row in TABLE if command in row.commands]
    return "\n".join(["Names of other tutorials are understood as well:", *lines]) if lines else ""


def as_markdown() -> str:
    """The table, for docs/reference/old-names.md."""
    rows = [
        f"| {' '.join(f'`--{name}`' for name in row.old)} | {', '.join(row.commands)} | {_meaning(row, '`')} |"
        for row in TABLE
    ]
    rows += [f"| `{name}=...` | all | nothing: {why} |" for name, why in OLD_VARIABLES.items()]
    return "\n".join(["| Old | Commands | Here |", "| --- | --- | --- |", *rows])


def _meaning(row: OldName, quote: str = "") -> str:
    if not row.new:
        return f"nothing; {row.why}"
    return f"{quote}{row.new}{quote}" + (f" ({row.why})" if row.why else "")


if __name__ == "__main__":
    print(as_markdown())  # noqa: T201
