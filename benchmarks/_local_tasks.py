"""Small language models, and text for them, for local_steps.py."""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from manyhands.recipes.albert.data.python_docs import texts
from manyhands.recipes.albert.data.tokenizer import train_tokenizer

VOCABULARY = 1024
LENGTH = 32
MASKED = 5  # tokens of each sample: 15%
SEP_ID, MASK_ID = 3, 4
HELDOUT = 512
WARM_UP_SHARE = 0.1
LAST_LR_SHARE = 0.1
MAX_GRAD_NORM = 1.0
INIT = 0.05
FOLDERS = (
    "/usr/share/doc",
    "/usr/share/perl",
    "/usr/lib/python3",
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
)
KINDS = (".py", ".pyi", ".rst", ".md", ".txt", ".pm", ".pod", ".h")
FILE_BYTES = 200_000  # of one file; the rest is left out
TOKENIZER_BYTES = 2_000_000  # of the text that the tokenizer is trained with

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """How much one row of the table computes.

    Attributes:
        name: in the rows.
        steps: inner steps of each peer.
        batch: samples of a batch.
        rate: the highest learning rate.
        widths, layers: of each model.
        text: "recipe", or "machine" for the sources and docs on this machine.
    """

    name: str
    steps: int
    batch: int
    rate: float
    widths: dict[str, int]
    layers: int
    text: str = "recipe"

    @property
    def num_tokens(self) -> int:
        """Of training text, so that no sample comes twice in four peers; the recipe's text is what it is."""
        return 0 if self.text == "recipe" else 4 * (self.steps + 300) * self.batch * LENGTH  # steps are rounded up


SIZES = {
    "quick": Size("quick", steps=500, batch=4, rate=2e-3, widths={"albert": 64, "gpt": 64}, layers=2),
    "full": Size("full", steps=800, batch=4, rate=2e-3, widths={"albert": 320, "gpt": 256}, layers=2),
}


def new_model(kind: str, size: Size, seed: int) -> torch.nn.Module:
    """A model that computes ``.loss`` of a batch; without dropout, so that one process can compute the same."""
    width = size.widths[kind]
    torch.manual_seed(seed)
    if kind == "gpt":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=width, n_layer=size.layers, n_head=4,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=SEP_ID, eos_token_id=SEP_ID,
            )
        )  # fmt: skip
    return transformers.AlbertForMaskedLM(
        transformers.AlbertConfig(
            vocab_size=VOCABULARY, embedding_size=64, hidden_size=width, num_hidden_layers=size.layers,
            num_attention_heads=4, intermediate_size=4 * width, max_position_embeddings=LENGTH, initializer_range=INIT,
        )
    )  # fmt: skip


class BySamples(torch.optim.AdamW):
    """AdamW with warm-up and a cosine over its own steps.

    All modes have the same rate after the same samples. ``manyhands.Optimizer``'s own ``scheduler`` moves once for each
    average, so its curve would have other steps in each mode.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, num_steps: int) -> None:
        super().__init__(params, lr=lr, weight_decay=0.01, betas=(0.9, 0.99))
        self._num_done, self._num_steps = 0, num_steps

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate * rate_factor(self._num_done, self._num_steps)
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        self._num_done += 1


def rate_factor(step: int, num_steps: int) -> float:
    """The learning rate of a step, as a share of the highest."""
    warm_up = WARM_UP_SHARE * num_steps
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / (num_steps - warm_up))
    return LAST_LR_SHARE + (1 - LAST_LR_SHARE) * (1 + math.cos(math.pi * done)) / 2


@functools.lru_cache(maxsize=1)
def samples(text: str = "recipe", num_tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids for training, in the order of the text, and of documents that are held out; each [samples, LENGTH].

    Args:
        num_tokens: to stop at, with ``text="machine"``. The held-out documents do not depend on it.
    """
    if text == "machine":
        return _samples_of_machine(num_tokens)
    documents = [document for document in texts() if document]
    tokenizer = train_tokenizer(documents, VOCABULARY)
    encoded = [tokenizer(list(document), add_special_tokens=False)["input_ids"] for document in documents]
    streams = [[token for paragraph in document for token in (*paragraph, SEP_ID)] for document in encoded]
    order = list(range(len(streams)))
    random.Random("held-out documents").shuffle(order)
    heldout: list[int] = []
    while len(heldout) < HELDOUT * LENGTH:
        heldout += streams[index := order.pop()]
        streams[index] = []
    return cut([token for stream in streams for token in stream]), cut(heldout)[:HELDOUT]


def _samples_of_machine(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    files = files_of_machine()
    first: list[str] = []
    while sum(map(len, first)) < TOKENIZER_BYTES:
        first.append(read(next(files)))
    tokenizer = train_tokenizer([first], VOCABULARY)
    heldout: list[int] = []
    training: list[torch.Tensor] = []
    num_read = 0
    for content in itertools.chain(first, map(read, files)):
        ids = [*tokenizer(content, add_special_tokens=False)["input_ids"], SEP_ID]
        if len(heldout) < HELDOUT * LENGTH:
            heldout += ids[: HELDOUT * LENGTH // 16]  # of many files
            continue
        training.append(torch.tensor(ids, dtype=torch.int16))
        num_read += len(ids)
        if num_read >= num_tokens:
            return torch.cat(training)[: num_read // LENGTH * LENGTH].long().view(-1, LENGTH), cut(heldout)[:HELDOUT]
    raise RuntimeError(f"this machine has text of {num_read} tokens, and {num_tokens} are needed")


def files_of_machine() -> Iterator[Path]:
    """Sources and docs, shuffled; of files with the same name and size only one."""
    found: dict[tuple[str, int], Path] = {}
    for folder in FOLDERS:
        for where, _, names in os.walk(folder):
            for name in names:
                path = Path(where, name)
                if path.suffix in KINDS and path.is_file() and (size := path.stat().st_size) > 2000:
                    found.setdefault((name, size), path)
    order = [found[key] for key in sorted(found)]
    random.Random("files").shuffle(order)
    yield from order


def read(path: Path) -> str:
    return path.read_bytes()[:FILE_BYTES].decode(errors="replace")


def cut(tokens: Sequence[int]) -> torch.Tensor:
    """Samples of LENGTH tokens; a rest is left out."""
    return torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)


def batch_of(kind: str, ids: torch.Tensor, generator: torch.Generator) -> Batch:
    """The input of a model: all tokens are predicted by gpt, masked ones by albert."""
    if kind == "gpt":
        return {"input_ids": ids, "labels": ids}
    masked = torch.rand(ids.shape, generator=generator).topk(MASKED, dim=1).indices
    is_masked = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, masked, value=True)
    return {"input_ids": ids.masked_fill(is_masked, MASK_ID), "labels": ids.masked_fill(~is_masked, -100)}


class Shards:
    """The batches of each peer, the same for the same seed.

    ``iid``: each peer gets other samples of one shuffled text. ``noniid``: each has a part of the text of its own, in
    which it shuffles.
    """

    def __init__(self, kind: str, shards: str, num_peers: int, size: Size, seed: int) -> None:
        self._kind, self._batch, self._seed, self._num_peers = kind, size.batch, seed, num_peers
        self._is_iid = shards == "iid"
        self._training = samples(size.text, size.num_tokens)[0]

    def batch(self, peer: int, step: int) -> Batch:
        """A peer's batch of a step."""
        training, size, number = self._training, self._batch, step
        if not self._is_iid:
            length = len(training) // self._num_peers
            training = training[peer * length : (peer + 1) * length]
        else:
            number = step * self._num_peers + peer
        per_epoch = len(training) // size
        epoch, position = divmod(number, per_epoch)
        order = _order(f"{self._seed} {epoch} {0 if self._is_iid else peer}", len(training))
        ids = training[order[position * size : (position + 1) * size]]
        return batch_of(self._kind, ids, torch.Generator().manual_seed(hash((self._seed, peer, step))))


@functools.lru_cache(maxsize=8)
def _order(key: str, length: int) -> torch.Tensor:
    order = list(range(length))
    random.Random(key).shuffle(order)
    return torch.tensor(order)


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch of several."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


@torch.no_grad()
def heldout_loss(kind: str, model: torch.nn.Module, size: Size) -> float:
    """Mean loss of the held-out samples, with the same masks each time."""
    model.eval()
    batch = batch_of(kind, samples(size.text, size.num_tokens)[1], torch.Generator().manual_seed(0))
    loss = float(model(**batch).loss)
    model.train()
    return loss
