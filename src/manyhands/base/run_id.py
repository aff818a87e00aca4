"""The name of a training run."""

from __future__ import annotations

from manyhands.base.errors import ConfigError

MAX_LENGTH = 64


def checked_run_id(run_id: str) -> str:
    """Return ``run_id`` if it can name a run: 1 to 64 printable characters without ``.``, ``/`` or white space.

    Raises:
        ConfigError: it breaks the rule.
    """
    example = "; for example: my-albert"
    if not isinstance(run_id, str):
        raise ConfigError(f"run_id is of type {type(run_id).__name__}; a text is needed" + example)
    if not run_id:
        raise ConfigError("run_id is empty; a name of 1 to 64 characters is needed" + example)
    if len(run_id) > MAX_LENGTH:
        raise ConfigError(f"run_id {run_id[:16]!r}… has {len(run_id)} characters; at most {MAX_LENGTH} fit" + example)
    if not run_id.isprintable() or any(char in "./" or char.isspace() for char in run_id):
        raise ConfigError(f"run_id {run_id!r} has a '.', a '/', a space or an unprintable character in it" + example)
    return run_id


def is_run_id(text: str) -> bool:
    """Whether a text can be the name of a run."""
    try:
        checked_run_id(text)
    except ConfigError:
        return False
    return True
