"""Turns what peers really send into what they might send: one seeded source of bad input.

A mutation is either made on the tree that the bytes encode (a field of another type, missing, twice, nested too deeply,
a number out of all bounds) or on the bytes themselves (flips, cuts, splices, lengths that are lies). Bytes within the
tree that are msgpack or compressed again are entered too.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

MAX_INPUT_BYTES = 1 << 20
DEPTHS = (8, 33, 200, 900, 1100, 100_000)


class Odd:
    """A leaf of the tree that is already encoded, perhaps wrongly."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


class Pairs(list[tuple[Any, Any]]):
    """A map, in which a key may come twice."""


NUMBERS = [
    bytes.fromhex(text)
    for text in (
        "00", "ff", "cc80", "cd0100", "ce7fffffff", "ceffffffff", "cf7fffffffffffffff", "cfffffffffffffffff",
        "d38000000000000000", "d2ffffffff", "cb7ff8000000000000", "cb7ff0000000000000", "cbfff0000000000000",
        "cb7fefffffffffffff", "cbffefffffffffffff", "cb0000000000000001", "cb8000000000000000", "cb3fe0000000000000",
        "ca7fc00000", "cb4340000000000001", "cf0020000000000000", "cf0020000000000001",
    )
]  # fmt: skip
TEXTS = [
    msgspec.msgpack.encode(text)
    for text in (
        "", "x", "\x00", "\x1b[2J\x1b[31m", "a\nb\r", "\u202e\u2066", "9" * 5000, "\u0663", "0.exp_avg", "-1.x",
        "1_0.x", "float32", "bool", "/ip4/1.2.3.4/tcp/1", "x" * 65, "x" * 501, "y" * 70_000,
        "\U0010ffff" * 300, "type", "NaN",
    )
]  # fmt: skip
OTHERS = [
    bytes.fromhex(text)
    for text in (
        "c0", "c2", "c3", "c1", "80", "90", "c400", "a2fffe", "a3eda080", "a1c0",
        "dbffffffff", "c6ffffffff", "ddffffffff", "dfffffffff", "dc7fff", "de7fff", "c9ffffffff05", "d97f",
        "d6ffffffffff", "d7ffffffffffffffffff", "c70cff" + "ff" * 12, "c70cff" + "00" * 4 + "7f" + "ff" * 7,
        "d40500", "810101", "82a16101a16102", "818001", "81918001", "81cb7ff800000000000001", "8191010102", "81c0c0",
    )
]  # fmt: skip


def pack(tree: Any) -> bytes:
    """The msgpack of a tree with its oddities."""
    if isinstance(tree, Odd):
        return tree.raw
    if isinstance(tree, Pairs):
        items = b"".join(pack(key) + pack(value) for key, value in tree)
        return b"\xdf" + len(tree).to_bytes(4, "big") + items
    if isinstance(tree, list):
        return b"\xdd" + len(tree).to_bytes(4, "big") + b"".join(pack(item) for item in tree)
    return msgspec.msgpack.encode(tree)


def unpack(raw: bytes) -> Any:
    """The tree of some msgpack, with each map as :class:`Pairs`.

    Raises:
        ValueError: it is none.
    """
    return _with_pairs(msgspec.msgpack.decode(raw))


def _with_pairs(value: Any) -> Any:
    if isinstance(value, dict):
        return Pairs((key, _with_pairs(item)) for key, item in value.items())
    return [_with_pairs(item) for item in value] if isinstance(value, list) else value


class Mutator:
    """Makes inputs from seeds.

    Args:
        rng: all chance comes from here, so that a seed gives the same inputs again.
        seeds: whole and valid inputs.
    """

    def __init__(self, rng: random.Random, seeds: Sequence[bytes]) -> None:
        self._rng = rng
        self._seeds = seeds

    def msgpack(self) -> bytes:
        """A seed that is msgpack, damaged in its tree, in its bytes, or in both."""
        raw = self._rng.choice(self._seeds)
        chance = self._rng.random()
        if chance < 0.8:
            raw = self._in_tree(raw)
        return self.damaged(raw) if chance > 0.7 else raw[:MAX_INPUT_BYTES]

    def text(self, tokens: Sequence[str]) -> bytes:
        """A seed that is UTF-8 text, with some of ``tokens`` put into it."""
        raw = self._rng.choice(self._seeds)
        for _ in range(self._rng.randrange(4)):
            at = self._rng.randrange(len(raw) + 1)
            times = self._rng.choice((1, 1, 1, 2, 70, 5000))
            token = self._rng.choice(tokens).encode("utf-8", "surrogateescape") * times
            raw = raw[:at] + token + raw[at + self._rng.choice((0, 0, 1, 3, 8, len(token))) :]
        return self.damaged(raw) if self._rng.random() < 0.5 else raw

    def damaged(self, raw: bytes) -> bytes:
        """One to three places of ``raw`` are no longer as they were."""
        damages = (self._flip, self._overwrite, self._insert, self._cut_out, self._truncate, self._repeat, self._splice)
        for _ in range(self._rng.randrange(1, 4)):
            raw = self._rng.choice(damages)(raw)
        return raw[:MAX_INPUT_BYTES]

    # in the tree

    def _in_tree(self, raw: bytes) -> bytes:
        try:
            tree = unpack(raw)
        except (ValueError, RecursionError):
            return self.damaged(raw)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            tree = self._changed(tree)
        return pack(tree)

    def _changed(self, tree: Any) -> Any:
        """The tree with one change somewhere in it."""
        if isinstance(tree, (Pairs, list)) and tree and self._rng.random() < 0.8:
            at = self._rng.randrange(len(tree))
            if self._rng.random() < 0.35:
                return self._changed_container(tree, at)
            if isinstance(tree, Pairs):
                key, value = tree[at]
                return Pairs([*tree[:at], (key, self._changed(value)), *tree[at + 1 :]])
            return [*tree[:at], self._changed(tree[at]), *tree[at + 1 :]]
        return self._changed_leaf(tree)

    def _changed_container(self, tree: Any, at: int) -> Any:
        kind = type(tree)
        choice = self._rng.randrange(5)
        if choice == 0:  # one less
            return kind([*tree[:at], *tree[at + 1 :]])
        if choice == 1:  # one twice, or very often
            return kind([*tree[:at], *[tree[at]] * self._rng.choice((2, 2, 3, 10, 300)), *tree[at + 1 :]])
        if choice == 2:  # another one
            item = (self._odd(), self._odd()) if kind is Pairs else self._odd()
            return kind([*tree[:at], item, *tree[at:]])
        if choice == 3:  # one under a wrong name, or in the place of another
            if kind is Pairs:
                return Pairs([*tree[:at], (self._odd(), tree[at][1]), *tree[at + 1 :]])
            return [*tree[:at], self._rng.choice(tree), *tree[at + 1 :]]
        return kind(self._rng.sample(tree, len(tree)))

    def _changed_leaf(self, leaf: Any) -> Any:
        chance = self._rng.random()
        if isinstance(leaf, bytes) and chance < 0.7:
            return self._changed_bytes(leaf)
        if isinstance(leaf, str) and chance < 0.4:
            damaged = self.damaged(leaf.encode())
            return Odd(b"\xdb" + len(damaged).to_bytes(4, "big") + damaged)
        if isinstance(leaf, (int, float)) and chance < 0.6:
            return Odd(self._rng.choice(NUMBERS))
        return self._odd()

    def _changed_bytes(self, leaf: bytes) -> bytes:
        try:
            return zlib.compress(self._in_tree(zlib.decompress(leaf)), 1)
        except zlib.error:
            pass
        return self._in_tree(leaf) if self._rng.random() < 0.7 else self.damaged(leaf)

    def _odd(self) -> Odd:
        chance = self._rng.random()
        if chance < 0.3:
            return Odd(self._rng.choice(NUMBERS))
        if chance < 0.55:
            return Odd(self._rng.choice(TEXTS))
        if chance < 0.85:
            return Odd(self._rng.choice(OTHERS))
        depth = self._rng.choice(DEPTHS)
        opening = self._rng.choice((b"\x91", b"\x81\xa1x", b"\x81", b"\x92\x01"))
        if chance < 0.95:
            return Odd((opening * depth)[:300_000] + self._rng.choice((b"\xc0", b"")))
        return Odd(b"\xdd" + depth.to_bytes(4, "big") + self._rng.choice((b"\xc0", b"\xa1x", b"\x80")) * depth)

    # in the bytes

    def _flip(self, raw: bytes) -> bytes:
        return self._at(raw, lambda byte: byte ^ (1 << self._rng.randrange(8)))

    def _overwrite(self, raw: bytes) -> bytes:
        at = self._rng.randrange(len(raw) + 1)
        news = (b"\xff" * 4, b"\x00", b"\x7f", b"\x80" * 4, b"\x00\x10\x00\x00", b"\xc1", b"\xdf", b"\n")
        new = self._rng.choice(news)
        return raw[:at] + new + raw[at + len(new) :]

    def _insert(self, raw: bytes) -> bytes:
        at = self._rng.randrange(len(raw) + 1)
        return raw[:at] + self._rng.randbytes(self._rng.choice((1, 1, 2, 4, 40))) + raw[at:]

    def _cut_out(self, raw: bytes) -> bytes:
        at = self._rng.randrange(len(raw) + 1)
        return raw[:at] + raw[at + self._rng.choice((1, 1, 2, 4, 40)) :]

    def _truncate(self, raw: bytes) -> bytes:
        return raw[: self._rng.randrange(len(raw) + 1)]

    def _repeat(self, raw: bytes) -> bytes:
        at = self._rng.randrange(len(raw) + 1)
        return raw[:at] + raw[at : at + self._rng.randrange(1, 60)] * self._rng.choice((2, 3, 50)) + raw[at:]

    def _splice(self, raw: bytes) -> bytes:
        other = self._rng.choice(self._seeds)
        return raw[: self._rng.randrange(len(raw) + 1)] + other[self._rng.randrange(len(other) + 1) :]

    def _at(self, raw: bytes, change: Callable[[int], int]) -> bytes:
        if not raw:
            return raw
        at = self._rng.randrange(len(raw))
        return raw[:at] + bytes([change(raw[at])]) + raw[at + 1 :]
