"""Model sizes by name or from a ``config.json``. Imports no torch: the command line checks them first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from manyhands.base.errors import ConfigError

PRESETS: Mapping[str, Mapping[str, int]] = {
    "small": {},  # the recipe's defaults
    "albert-large-v2": {
        "vocab_size": 30_000,
        "embedding_size": 128,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
"""The recipe settings of each model, by its name. Source: the ``config.json`` of ``albert/albert-large-v2``."""

_SIZES = tuple(PRESETS["albert-large-v2"])
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("albert",),
    "hidden_act": ("gelu_new",),
    "num_hidden_groups": (1,),
    "inner_group_num": (1,),
    "type_vocab_size": (2,),
    "hidden_dropout_prob": (0, 0.0),
    "attention_probs_dropout_prob": (0, 0.0),
}
"""Further entries of a ``config.json``, with the values that this recipe supports."""


def model_settings(model: str) -> dict[str, int]:
    """The recipe settings that define a model.

    Args:
        model: a name of :data:`PRESETS`, also as on the Hub (``albert/albert-large-v2``), or the path of a
            ``config.json`` or its folder.
    Raises:
        ConfigError: there is no such model, or this recipe cannot build it.
    """
    if (preset := PRESETS.get(model.removeprefix("albert/"))) is not None:
        return dict(preset)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        names = " or ".join(PRESETS)
        raise ConfigError(f"--model {model}: no such model, and no such file; give {names}, or a config.json") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--model {model}: {path} cannot be read as a config.json: {error}") from None
    for name, allowed in _FIXED.items():
        if name in config and config[name] not in allowed:
            raise ConfigError(
                f"--model {model}: {name} is {config[name]!r}; this recipe trains models with {allowed[0]!r} alone"
            )
    missing = [name for name in _SIZES if not isinstance(config.get(name), int) or config[name] < 1]
    if missing:
        raise ConfigError(f"--model {model}: {path} must have a whole number above 0 for {', '.join(missing)}")
    return {name: config[name] for name in _SIZES}
