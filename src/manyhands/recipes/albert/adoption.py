"""Reads the recipe of a run from its manifest, so that a newcomer can take it over.

All settings that the peers of a run must share are facts of the manifest (``must_match`` of the optimizer), so a
newcomer needs to give none of them. Imports no torch: a newcomer that does not fit is rejected at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from manyhands.base.errors import ConfigError, ManifestMismatch
from manyhands.base.identity import PeerId
from manyhands.recipes.albert.config import OWN_SETTINGS, AlbertRecipe
from manyhands.recipes.albert.data.run_data import OF_PYTHON, RunData
from manyhands.rpc.frames import readable

NAME = "albert 1"
"""Name and version of this recipe; the version goes up when its facts or their meaning change."""

MAX_NUMBER = 10**9

_RECIPE = "recipe"
_TOKENIZER = "tokenizer"
_VOCABULARY = "vocabulary"
_DATA = "data"
_DATA_URL = "data_url"
_LOCAL_STEPS = "local_steps"
"""The optimizer itself adds this fact to the manifest, with the outer optimizer."""
_KINDS: dict[str, Callable[[str], Any]] = {
    field.name: {"int": int, "float": float, "str": str}[str(field.type)]
    for field in fields(AlbertRecipe)
    if field.name not in (*OWN_SETTINGS, _LOCAL_STEPS)
}
"""The settings that all peers of a run share, and how to parse each."""


@dataclass(frozen=True, kw_only=True)
class RunRecipe:
    """The recipe that a run trains.

    Attributes:
        tokenizer: digest of its tokenizer; see :func:`manyhands.recipes.albert.data.tokenizer.tokenizer_digest`.
        vocab_size: length of that tokenizer, which may be below ``recipe.vocab_size``.
        data: the data that the run trains on. The user of a peer may choose other data.
    """

    recipe: AlbertRecipe
    tokenizer: str
    vocab_size: int
    data: RunData = OF_PYTHON

    def with_own(self, given: Mapping[str, Any]) -> RunRecipe:
        """A copy with the settings in ``given`` that a peer may choose itself."""
        own = {name: given[name] for name in OWN_SETTINGS if name in given}
        return replace(self, recipe=replace(self.recipe, **own))


@dataclass(frozen=True)
class RunToJoin:
    """An existing run that this peer joins.

    Attributes:
        peers: some of its peers, which can send the tokenizer.
    """

    recipe: RunRecipe
    peers: Sequence[PeerId]


def facts_of(run: RunRecipe) -> dict[str, str]:
    """The settings that all peers of a run must share, as text, except for those that the optimizer adds."""
    shared = {name: str(getattr(run.recipe, name)) for name in _KINDS}
    facts = {_RECIPE: NAME, _TOKENIZER: run.tokenizer, _VOCABULARY: str(run.vocab_size), _DATA: run.data.digest}
    if run.data.urls:
        facts[_DATA_URL] = " ".join(run.data.urls)
    return facts | shared


def is_recipe(facts: Mapping[str, str]) -> bool:
    """Whether these are facts of this recipe, in any version."""
    return _RECIPE in facts


def adopted(run_id: str, facts: Mapping[str, str], given: Mapping[str, Any]) -> RunRecipe:
    """The recipe of a run, with the settings that a newcomer chooses itself.

    Args:
        facts: from :func:`facts_of`: ``extra`` of the run manifest, or the facts of a checkpoint.
        given: settings that the newcomer's user named, by the names of :class:`AlbertRecipe`.
    Raises:
        ManifestMismatch: a given setting must be equal on all peers and differs from the run's; names both values.
        ConfigError: this version does not know the recipe of the run.
    """
    if not is_recipe(facts):
        raise ConfigError(
            f"run {run_id!r} was begun by another program, not by manyhands train; run that program to join it"
        )
    if facts[_RECIPE] != NAME:
        raise ConfigError(
            f"run {run_id!r} trains recipe {readable(facts[_RECIPE])!r}, which this version does not know (it knows "
            f"{NAME!r}); install the version of manyhands that its peers have"
        )
    try:
        shared = {name: kind(facts[name]) for name, kind in _KINDS.items()} | {_LOCAL_STEPS: _LOCAL_STEPS in facts}
        vocab_size = int(facts[_VOCABULARY])
        numbers = {name: value for name, value in shared.items() if not isinstance(value, str)}
        for name, number in (numbers | {_VOCABULARY: vocab_size}).items():
            least = 1 if name == _VOCABULARY else -MAX_NUMBER
            if number < least or number > MAX_NUMBER:
                raise ValueError(f"{name} is out of bounds: it must be from {least} to {MAX_NUMBER}")
        recipe = AlbertRecipe(**shared, **{name: given[name] for name in OWN_SETTINGS if name in given})
        data = RunData(facts[_DATA], tuple(facts.get(_DATA_URL, "").split()))
        run = RunRecipe(recipe=recipe, tokenizer=facts[_TOKENIZER], vocab_size=vocab_size, data=data)
    except (KeyError, ValueError) as error:
        if isinstance(error, ConfigError) and given.keys() & set(OWN_SETTINGS):
            raise
        raise ConfigError(f"the recipe of run {run_id!r} cannot be used: {readable(str(error))}") from error
    differences = [
        f"{name} is {given[name]} here, {shared[name]} in the run"
        for name in shared
        if name in given and given[name] != shared[name]
    ]
    if given.get(_LOCAL_STEPS) and not shared[_LOCAL_STEPS]:
        differences[-1] += ", which has synchronous steps: leave --local-steps out"
    if differences:
        raise ManifestMismatch(run_id, differences)
    return run
