"""Reads ``tokenizer.json`` files and their special tokens. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.base.text import reason_of

try:
    import tokenizers
except ModuleNotFoundError as error:
    if error.name != "tokenizers":
        raise
    raise MissingExtra("the ALBERT recipe", "albert") from error

FILE = "tokenizer.json"

_NAMES = {
    "pad_token": ("<pad>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]",),
}
"""Names of the special tokens by role in ALBERT and BERT; the file itself does not record the roles."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The token ids that samples and models need.

    Attributes:
        size: number of tokens; all ids are below it.
    """

    size: int
    pad: int
    unknown: int
    cls: int
    sep: int
    mask: int

    @property
    def special(self) -> frozenset[int]:
        """Ids of tokens that are never guessed."""
        return frozenset((self.pad, self.unknown, self.cls, self.sep, self.mask))


def special_tokens(backend: tokenizers.Tokenizer) -> dict[str, str]:
    """The special tokens by role, with the role names of transformers.

    Raises:
        ValueError: one is missing.
    """
    found = {}
    for role, names in _NAMES.items():
        token = next((name for name in names if backend.token_to_id(name) is not None), None)
        if token is None:
            raise ValueError(f"it has no {' or '.join(names)}; ALBERT needs it")
        found[role] = token
    return found


def vocabulary_of(backend: tokenizers.Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, with the ids of its special tokens.

    Raises:
        ValueError: it lacks the special tokens that ALBERT needs.
    """
    everything = backend.get_vocab(with_added_tokens=True)
    ids = {role: everything[token] for role, token in special_tokens(backend).items()}
    return Vocabulary(
        size=len(everything),
        pad=ids["pad_token"],
        unknown=ids["unk_token"],
        cls=ids["cls_token"],
        sep=ids["sep_token"],
        mask=ids["mask_token"],
    )


def digest_of_json(text: str) -> str:
    """SHA-256 of everything that determines the token ids of a text, in hex; equal digests mean equal ids.

    Raises:
        ValueError: the text is not the JSON of a tokenizer.
    """
    description = json.loads(text)
    if not isinstance(description, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 (of what others sent)
    for per_call in ("padding", "truncation"):
        description.pop(per_call, None)
    return hashlib.sha256(json.dumps(description, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def backend_from_json(text: str) -> tokenizers.Tokenizer:
    """The tokenizer in a JSON text, without padding or truncation.

    Raises:
        ValueError: it cannot be read, or ALBERT cannot use it.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        # tokenizers raises a plain Exception
        raise ValueError(reason_of(error)) from error
    backend.no_padding()
    backend.no_truncation()
    registered = {token.content for token in backend.get_added_tokens_decoder().values()}
    # transformers would add the missing ones, and change the digest
    backend.add_special_tokens([token for token in special_tokens(backend).values() if token not in registered])
    return backend


def check_tokenizer(folder: Path, run_id: str, digest: str) -> None:
    """Check that the tokenizer in a folder has the given digest, that of a run.

    Raises:
        ConfigError: it has another one.
    """
    here = digest_of_json(read_tokenizer(folder).to_str())
    if here != digest:
        raise ConfigError(
            f"{folder / FILE}: tokenizer {here[:12]} is not that of run {run_id!r} ({digest[:12]}); leave out "
            "--tokenizer, as the peers of the run send it, or get it from the person who began the run"
        )


def tokenizer_folder(path: Path) -> Path:
    """The folder of a tokenizer, which may be named by its ``tokenizer.json``."""
    return path.parent if path.name == FILE and not path.is_dir() else path


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a folder, as ``save_pretrained`` of transformers wrote it.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    path = folder / FILE
    try:
        return backend_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"tokenizer {path}: {error.strerror}; name the folder with the {FILE} that the samples were made with; "
            "manyhands data prepare makes one"
        ) from error
    except ValueError as error:
        raise ConfigError(f"tokenizer {path} cannot be used: {error}") from error
