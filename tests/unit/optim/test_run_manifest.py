from __future__ import annotations

import asyncio
import datetime
import tracemalloc
import zlib
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, ManifestMismatch
from manyhands.base.identity import PeerId
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.optim import manifest as manifest_module
from manyhands.optim.manifest import (
    MAX_BYTES,
    MAX_DIFFERENT,
    RATES,
    ManifestKeeper,
    RunManifest,
    by_signers,
    differences,
    manifest_key,
    read_manifest,
)
from tests.unit.optim.fake_dht import FakeDht

MANIFEST = RunManifest(
    protocol="manyhands/1",
    run_id="run",
    target_batch_size=64,
    tensors=[ParameterSpec("weight", (8, 5), "float32"), ParameterSpec("bias", (8,), "float32")],
    frozen=[],
    optimizer="AdamW",
    hyper_parameters=[{"lr": 0.1}],
    scheduler="",
    codec="none",
    extra={"tokenizer": "abc"},
)
KEY = manifest_key("run")


def changed(**fields: Any) -> RunManifest:
    return msgspec.structs.replace(MANIFEST, **fields)


def published(manifest: RunManifest) -> bytes:
    return zlib.compress(manifest.encoded())


def keeper_of(dht: Any, name: str, manifest: RunManifest, expected: bytes = b"") -> ManifestKeeper:
    return ManifestKeeper(dht, PeerId(name), manifest, AsyncMock(), expected)


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (changed(target_batch_size=32), "target_batch_size is 64 here, 32 in the run"),
        (changed(optimizer="SGD", hyper_parameters=[{"momentum": 0}]), "optimizer is 'AdamW' here, 'SGD' in the run"),
        (changed(hyper_parameters=[{"lr": 0.2}]), "learning_rate is 0.1 here, 0.2 in the run"),
        (changed(hyper_parameters=[{"lr": 0.1, "eps": 1e-6}]), "eps is None here, 1e-06 in the run"),
        (
            changed(hyper_parameters=[{"lr": 0.1}, {"lr": 0.2}]),
            "the optimizer has 1 parameter groups here, 2 in the run",
        ),
        (changed(scheduler="StepLR()"), "scheduler is '' here, 'StepLR()' in the run"),
        (changed(frozen=["bias"]), "frozen is [] here, ['bias'] in the run"),
        (changed(extra={"tokenizer": "xyz"}), "tokenizer is abc here, xyz in the run"),
        (changed(extra={}), "tokenizer is abc here, not set in the run"),
        (
            changed(tensors=[ParameterSpec("weight", (9, 5), "float32"), MANIFEST.tensors[1]]),
            "tensor weight has shape [8, 5] here, [9, 5] in the run",
        ),
        (
            changed(tensors=[ParameterSpec("weight", (8, 5), "bfloat16"), MANIFEST.tensors[1]]),
            "tensor weight is float32 here, bfloat16 in the run",
        ),
        (changed(tensors=MANIFEST.tensors[:1]), "the model has 2 tensors here, 1 in the run"),
        (
            changed(tensors=[MANIFEST.tensors[0], ParameterSpec("scale", (9,), "float32")]),
            "tensor bias (here) / scale (in the run) has shape [8] here, [9] in the run",
        ),
    ],
)
def test_a_difference_is_named_with_both_values(other: RunManifest, line: str) -> None:
    assert differences(MANIFEST, other) == [line]
    assert other.fingerprint() != MANIFEST.fingerprint()


def test_many_differences_are_cut_short() -> None:
    tensors = [ParameterSpec(f"t{index}", (index,), "float32") for index in range(2)]
    other = changed(tensors=tensors, target_batch_size=1, optimizer="SGD", scheduler="x", codec="y", extra={})
    lines = differences(MANIFEST, other)
    assert len(lines) == 6
    assert lines[-1] == "and 1 more"


def test_tensors_that_differ_are_one_line() -> None:
    other = changed(tensors=[ParameterSpec("weight", (9, 5), "float32"), ParameterSpec("bias", (9,), "float32")])
    assert differences(MANIFEST, other) == [
        "tensor weight has shape [8, 5] here, [9, 5] in the run (2 of 2 tensors differ)"
    ]


def test_a_difference_in_several_groups_and_a_fact_is_one_line() -> None:
    own = changed(hyper_parameters=[{"lr": 0.1}, {"lr": 0.1}], extra={"learning_rate": "0.1"})
    run = changed(hyper_parameters=[{"lr": 0.2}, {"lr": 0.2}], extra={"learning_rate": "0.2"})
    assert differences(own, run) == ["learning_rate is 0.1 here, 0.2 in the run"]


@pytest.mark.parametrize(
    "other",
    [
        changed(optimizer="x" * 100_000, frozen=["y" * 100_000], codec="\x1b[2J"),
        changed(extra={"tokenizer": "\x1b[2J", "\n": "x" * 100_000}),
        changed(
            tensors=[ParameterSpec("\x1b[2J" * 10_000, (1,) * 100_000, "z"), ParameterSpec("b", (8,), "\n" * 9999)]
        ),
    ],
)
def test_manifests_of_strangers_give_short_printable_differences(other: RunManifest) -> None:
    lines = differences(MANIFEST, other)
    assert lines
    assert all(line.isprintable() and len(line) < 3000 for line in lines)


def test_learning_rates_of_a_schedule_are_compared_where_nothing_else_explains_them() -> None:
    other = changed(extra=MANIFEST.extra | {RATES: "0.2, 0.1"})
    own = changed(extra=MANIFEST.extra | {RATES: "0.2, 0.2"})
    assert differences(own, other) == [
        "learning rate after 0, 1, 2, 4, 8, 16, 32, 64, 128, 256 steps is 0.2, 0.2 here, 0.2, 0.1 in the run"
    ]
    other = changed(scheduler="StepLR()", extra=other.extra)
    assert differences(own, other) == [f"scheduler is {MANIFEST.scheduler!r} here, 'StepLR()' in the run"]


def test_equal_settings_have_no_differences() -> None:
    assert differences(MANIFEST, changed()) == []
    assert changed(hyper_parameters=[{"lr": 0.1}]).fingerprint() == MANIFEST.fingerprint()


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2), min_size=1))
def test_the_manifest_of_the_most_peers_is_the_runs(votes: dict[str, int]) -> None:
    signers = {bytes([n]): [PeerId(name) for name, vote in votes.items() if vote == n] for n in set(votes.values())}
    chosen = by_signers(signers)
    assert chosen == by_signers(dict(reversed(signers.items())))
    assert len(signers[chosen[0]]) == max(map(len, signers.values()))


def test_of_equally_many_the_lowest_peer_id_decides() -> None:
    assert by_signers({b"1": [PeerId("b")], b"2": [PeerId("a")]}) == [b"2", b"1"]


# what others published


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


NESTED = b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        b"",
        b"not zlib",
        zlib.compress(b"not a manifest"),
        zlib.compress(MANIFEST.encoded())[:-9],
        zlib.compress(b"\0" * (MAX_BYTES + 1)),
        zlib.compress(NESTED),
        zlib.compress(changed(hyper_parameters=[{"lr": "HERE"}]).encoded().replace(b"\xa4HERE", NESTED)),
        published(changed(run_id="another")),
        zlib.compress(msgspec.msgpack.encode(changed(hyper_parameters=[{"lr": {1: 2}}]))),
        published(changed(hyper_parameters=[{"lr": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)}])),
        published(changed(hyper_parameters=[{"lr": nested(33)}])),
        published(changed(hyper_parameters=[{"lr": [0] * MAX_BYTES}])),
    ],
)
async def test_manifests_that_cannot_be_read_are_skipped(value: Any) -> None:
    dht: Any = FakeDht()
    dht.put(KEY, "bad", value, sequence=1)
    dht.put(KEY, "good", published(MANIFEST), sequence=1)
    dht.put(KEY, "unsigned", published(changed(target_batch_size=1)), sequence=1, owner="")
    assert await read_manifest(dht, "run") == (MANIFEST, ["good"])


async def signers(dht: Any) -> list[PeerId]:
    signed = await read_manifest(dht, "run")
    return sorted(signed.signers) if signed is not None else []


def test_a_model_whose_names_nobody_would_read_is_refused_where_it_begins() -> None:
    tensors = [ParameterSpec(f"layers.{number}.{'x' * 80}", (8, 5), "float32") for number in range(3000)]
    with pytest.raises(ConfigError, match="with the names and shapes of 3000 tensors; at most 262144 can be published"):
        keeper_of(FakeDht(), "a", changed(tensors=tensors))


async def test_manifests_that_unpack_to_megabytes_do_not_fill_the_memory() -> None:
    dht: Any = FakeDht()
    for number in range(6):
        bomb = published(changed(hyper_parameters=[{"lr": [number] + [[]] * ((8 << 20) - 1000)}]))
        dht.put(KEY, f"bomb {number}", bomb, sequence=1)
        tensors = [ParameterSpec("", (), str(number))] * (MAX_BYTES // 10)
        largest = published(changed(tensors=tensors))
        dht.put(KEY, f"large {number}", largest, sequence=1)
    dht.put(KEY, "a", published(MANIFEST), sequence=1)
    dht.put(KEY, "b", published(MANIFEST), sequence=1)
    tracemalloc.start()
    try:
        assert await read_manifest(dht, "run") == (MANIFEST, ["a", "b"])
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_honest", [1, 3])
async def test_false_manifests_do_not_count_where_the_digest_of_a_ticket_is_known(num_honest: int) -> None:
    dht: Any = FakeDht()
    for number in range(5):
        dht.put(KEY, f"liar {number}", published(changed(target_batch_size=1)), sequence=1)
    for number in range(num_honest):
        dht.put(KEY, f"honest {number}", published(MANIFEST), sequence=1)
    expected = MANIFEST.fingerprint()[:16]
    signed = await read_manifest(dht, "run", expected)
    assert signed is not None
    assert signed.manifest == MANIFEST
    assert len(signed.signers) == num_honest
    keeper = keeper_of(dht, "newcomer", changed(), expected=expected)
    await keeper.agree()
    await keeper.close()


async def test_a_run_begins_with_the_settings_that_its_owner_signed_or_not_at_all() -> None:
    dht: Any = FakeDht()
    other = keeper_of(dht, "first", changed(target_batch_size=1), expected=MANIFEST.fingerprint())
    with pytest.raises(ManifestMismatch, match="its owner signed other settings") as caught:
        await other.agree()
    for manifest in (MANIFEST, changed(target_batch_size=1)):
        assert manifest.fingerprint().hex()[:16] in str(caught.value)
    assert await read_manifest(dht, "run") is None
    keeper = keeper_of(dht, "second", changed(), expected=MANIFEST.fingerprint())
    await keeper.agree()
    with pytest.raises(ManifestMismatch, match="target_batch_size is 1 here, 64 in the run"):
        await other.agree()
    await keeper.close()


async def test_fewer_liars_than_signers_keep_no_newcomer_out() -> None:
    dht: Any = FakeDht()
    for number in range(5):
        dht.put(KEY, f"liar {number}", published(changed(target_batch_size=1 + number % 2)), sequence=1)
    for number in range(4):
        dht.put(KEY, f"signer {number}", published(MANIFEST), sequence=1)
    keeper = keeper_of(dht, "newcomer", changed())
    await keeper.agree()
    await keeper.close()


async def test_a_peer_that_fits_the_run_signs_its_manifest_until_it_leaves() -> None:
    dht: Any = FakeDht()
    keepers = [keeper_of(dht, name, changed()) for name in "ab"]
    for keeper in keepers:
        await keeper.agree()
    assert await signers(dht) == ["a", "b"]
    await keepers[0].close()
    assert await signers(dht) == ["b"]
    await keepers[1].close()
    assert await signers(dht) == [], "whoever comes next may begin another run"


async def test_a_peer_that_does_not_fit_the_run_signs_nothing() -> None:
    """Else its manifest would outvote the run's when the next peer joins."""
    dht: Any = FakeDht()
    dht.put(KEY, "m", published(MANIFEST), sequence=1)
    with pytest.raises(ManifestMismatch, match="target_batch_size is 1 here, 64 in the run"):
        await keeper_of(dht, "a", changed(target_batch_size=1)).agree()
    assert await signers(dht) == ["m"]


async def test_of_two_that_begin_at_once_one_leaves_without_a_trace() -> None:
    dht: Any = FakeDht()

    async def another_begins() -> None:
        dht.put(KEY, "a", published(MANIFEST), sequence=1)

    other = ManifestKeeper(dht, PeerId("z"), changed(target_batch_size=1), another_begins, b"")
    with pytest.raises(ManifestMismatch):
        await other.agree()
    assert await signers(dht) == ["a"]


async def test_both_of_two_swarms_that_meet_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manifest_module, "IDLE_S", 0.05)
    monkeypatch.setattr(manifest_module, "MINUTE_S", 0.01)
    dht: Any = FakeDht()
    first = keeper_of(dht, "a", changed())
    await first.agree()
    dht.records.clear()  # it is in another network, which has not met this one yet
    second = keeper_of(dht, "b", changed(target_batch_size=32))
    await second.agree()
    async with time_limit(10.0, "for both to be told"):
        while len(lines := [record.getMessage() for record in caplog.records]) < 2:
            await asyncio.sleep(0)
    before = dht.num_reads
    async with time_limit(10.0, "for a few more periods"):
        while len(dht.stored) < 12:
            await asyncio.sleep(0)
    assert dht.num_reads == before, "it is not looked for again"
    await first.close()
    await second.close()
    lines.sort()
    assert lines[0].startswith(
        "Two groups of peers train run run with different settings, and share no work: target_batch_size is 32 here, "
        "64 at 1 other peer. Start one of them again with another --run-id"
    )
    assert "target_batch_size is 64 here, 32 at 1 other peer" in lines[1]


async def test_thousands_of_different_manifests_of_strangers_are_not_all_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dht: Any = FakeDht()
    for number in range(10 * MAX_DIFFERENT):
        dht.put(KEY, f"a liar {number}", published(changed(target_batch_size=1000 + number)), sequence=1)
    for name in ("signer", "signer too"):
        dht.put(KEY, name, published(MANIFEST), sequence=1)
    num_decoded = 0
    decompressobj = zlib.decompressobj

    def counted() -> Any:
        nonlocal num_decoded
        num_decoded += 1
        return decompressobj()

    monkeypatch.setattr(zlib, "decompressobj", counted)
    assert await read_manifest(dht, "run") == (MANIFEST, ["signer", "signer too"])
    assert 0 < num_decoded <= MAX_DIFFERENT + 2
