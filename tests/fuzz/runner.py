"""Feeds inputs to targets, counts them, and keeps those that fail."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.files import armoured
from tests.fuzz.mutate import Mutator
from tests.fuzz.target import Target, fault_in

CORPUS = Path(__file__).parent / "corpus"
TRACED_EVERY = 50


@dataclass(frozen=True)
class Finding:
    """An input that a target does not take as it should."""

    target: str
    data: bytes
    fault: str

    def save(self, folder: Path) -> Path:
        """Write the input to a file; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.target}-{hashlib.sha256(self.data).hexdigest()[:12]}.bin"
        path.write_bytes(self.data)
        return path


def corpus_of(target: Target) -> list[Path]:
    """Inputs that once failed."""
    return sorted((CORPUS / target.name).glob("*.bin"))


def inputs_of(target: Target, seed: int) -> Iterator[bytes]:
    """Endless inputs, the same for the same seed: first the valid ones, then what once failed, then mutations."""
    known = [path.read_bytes() for path in corpus_of(target)]
    yield from (_framed(data) if target.is_framed else data for data in target.seeds)
    yield from known
    rng = random.Random(f"{seed} {target.name}")
    bodies = [data[4:] if target.is_framed else data for data in known]
    mutator = Mutator(rng, [*target.seeds, *bodies])
    while True:
        yield _mutated(target, mutator, rng)


class Session:
    """One target under test, for as long as it is fed."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.num_inputs = 0
        self.finding: Finding | None = None
        self._inputs = inputs_of(target, seed)

    def feed(self, num_inputs: int) -> None:
        """Try some more inputs; none after the first finding."""
        for _ in range(num_inputs):
            if self.finding is not None:
                return
            data = next(self._inputs)
            self.num_inputs += 1
            traced = self.num_inputs % TRACED_EVERY == 0
            fault = fault_in(self.target, data, traced=traced)
            if fault is not None:
                self.finding = Finding(self.target.name, data, fault)


def feed_all(sessions: Sequence[Session], batch: int) -> None:
    """A turn for each."""
    for session in sessions:
        session.feed(batch)


def _mutated(target: Target, mutator: Mutator, rng: random.Random) -> bytes:
    if target.kind == "text":
        return mutator.text(target.tokens)
    if target.kind == "bytes":
        data = mutator.damaged(rng.choice(list(target.seeds)))
        return armoured(data) if target.name == "identity-file" and rng.random() < 0.2 else data
    data = mutator.msgpack()
    if not target.is_framed:
        return data
    framed = b"".join(_framed(mutator.msgpack()) for _ in range(rng.randrange(2))) + _framed(data)
    return mutator.damaged(framed) if rng.random() < 0.2 else framed


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
