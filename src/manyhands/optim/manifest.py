"""The run manifest: the settings that all peers of a run must share. Each peer signs and publishes it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from manyhands.averaging.timing import BRIEF_S, IDLE_S, MINUTE_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, ManifestMismatch, ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.base.structs import make_ready
from manyhands.base.text import counted
from manyhands.dht import DhtNode
from manyhands.optim.serializable import is_serializable
from manyhands.rpc.frames import readable
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

PROTOCOL = "manyhands/1"
MANIFEST_KIND = "manifest"  # the last part of the DHT keys of manifests
MAX_BYTES = 256 << 10  # of a manifest before compression: room for some thousands of tensors
MAX_HYPER_PARAMETERS_BYTES = 64 << 10
DECODED_IN_A_TURN = 8  # manifests, of at most 1 ms each, before the event loop runs other tasks
OPTION_NAMES = {"lr": "learning_rate"}  # options that have another name on the command line
REST_OF_MODEL = "parameters outside the optimizer"
"""The fact of the manifest that has the digest of the model's rest; see :mod:`manyhands.optim.rest_of_model`."""
LOOKED_AT = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""After how many steps peers compare the learning rates of their schedules when they join. A schedule may be a function
(``LambdaLR``), which cannot be compared itself."""
RATES = f"learning rate after {', '.join(map(str, LOOKED_AT))} steps"
"""The fact of the manifest with the learning rates after ``LOOKED_AT`` steps."""
MAX_DIFFERENT = 64
"""The largest number of different manifests that are decoded. A run has one, but strangers may publish thousands."""
SHOWN_SIGNERS = 3
SHOWN_DIFFERENCES = 5
SHOWN_DIGITS = 16  # of a fingerprint
SHOWN_CHARACTERS = 1000  # of one value in a difference, so that values of other peers fit on a screen


class RunManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of a run."""

    protocol: str  # wire version
    run_id: str
    target_batch_size: int
    tensors: list[ParameterSpec]  # the optimizer's parameters, in order
    frozen: list[str]  # names of those that are not trained
    optimizer: str  # class name
    hyper_parameters: list[dict[str, Any]]  # of each parameter group
    scheduler: str  # class name and constants, or empty
    codec: str  # how vectors are encoded on the wire
    extra: dict[str, str]  # further facts that must be equal, such as the digest of a tokenizer
    extra_tensors: list[ParameterSpec] = []  # averaged beside the parameters, such as buffers

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self, order="sorted")

    def fingerprint(self) -> bytes:
        """SHA-256 of the settings: equal for peers that fit together."""
        return hashlib.sha256(self.encoded()).digest()


make_ready(RunManifest)


def described_schedule(scheduler: Any) -> str:
    """A torch scheduler's class and constants, with those of nested schedulers; empty for None.

    Functions, as in ``LambdaLR``, have no constants and cannot be compared; see ``RATES``.
    """
    if scheduler is None:
        return ""
    state, parts = scheduler.state_dict(), []
    for name in sorted(state):
        value = sorted(state[name].elements()) if isinstance(state[name], Counter) else state[name]
        # left out: values that change with the steps, and those that are in the hyper-parameters already
        if not name.startswith("_") and name not in ("last_epoch", "base_lrs") and is_serializable(value):
            parts.append(f"{name}={value}")
    if "_milestones" in state:
        parts.append(f"milestones={state['_milestones']}")
    parts += [described_schedule(inner) for inner in getattr(scheduler, "_schedulers", [])]
    return f"{type(scheduler).__name__}({', '.join(parts)})"


def differences(own: RunManifest, run: RunManifest) -> list[str]:
    """The differences between a peer's settings and those of the run: a line for each, and one for all tensors."""
    lines = []
    for name in ("protocol", "target_batch_size", "optimizer", "scheduler", "codec", "frozen"):
        here, there = getattr(own, name), getattr(run, name)
        if here != there:
            lines.append(f"{name} is {_shown(here)} here, {_shown(there)} in the run")
    keys = own.extra.keys() | run.extra.keys()
    if (own.scheduler, own.hyper_parameters) != (run.scheduler, run.hyper_parameters):
        keys -= {RATES}  # they differ for that
    lines += [
        f"{readable(key)} is {readable(here)} here, {readable(there)} in the run"
        for key in sorted(keys)
        if (here := own.extra.get(key, "not set")) != (there := run.extra.get(key, "not set"))
    ]
    if own.extra.get(REST_OF_MODEL) != run.extra.get(REST_OF_MODEL):
        lines.append("give Optimizer(..., model=model) on all peers, with the same base in the same precision")
    if own.optimizer == run.optimizer:  # options of different kinds of optimizers cannot be compared
        lines += _option_differences(own.hyper_parameters, run.hyper_parameters)
    lines += _tensor_differences(own.tensors, run.tensors)
    if own.extra_tensors != run.extra_tensors:
        here, there = ([spec.name for spec in manifest.extra_tensors] for manifest in (own, run))
        lines.append(f"buffers and extra_tensors are {_shown(here)} here, {_shown(there)} in the run")
    lines = list(dict.fromkeys(lines))  # several parameter groups may give the same line, and so may facts
    if len(lines) > SHOWN_DIFFERENCES:
        lines[SHOWN_DIFFERENCES:] = [f"and {len(lines) - SHOWN_DIFFERENCES} more"]
    return lines


def _option_differences(own: list[dict[str, Any]], run: list[dict[str, Any]]) -> list[str]:
    if len(own) != len(run):
        return [f"the optimizer has {len(own)} parameter groups here, {len(run)} in the run"]
    return [
        f"{OPTION_NAMES.get(key, readable(key))} is {_shown(here.get(key))} here, {_shown(there.get(key))} in the run"
        for here, there in zip(own, run, strict=True)
        for key in {**here, **there}
        if here.get(key) != there.get(key)
    ]


def _tensor_differences(own: list[ParameterSpec], run: list[ParameterSpec]) -> list[str]:
    if len(own) != len(run):
        return [f"the model has {len(own)} tensors here, {len(run)} in the run"]
    different = [(here, there) for here, there in zip(own, run, strict=True) if here != there]
    if not different:
        return []
    here, there = different[0]
    name = here.name if here.name == there.name else f"{here.name} (here) / {readable(there.name)} (in the run)"
    if here.shape != there.shape:
        line = f"tensor {name} has shape {list(here.shape)} here, {_shown(list(there.shape))} in the run"
    else:
        line = f"tensor {name} is {readable(here.dtype)} here, {readable(there.dtype)} in the run"
    return [line if len(different) == 1 else f"{line} ({len(different)} of {len(own)} tensors differ)"]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


@dataclass(eq=False)
class ManifestKeeper:
    """Compares this peer's manifest with that of the run at join, and then keeps it alive in the DHT.

    Args:
        may_begin: called if no other peer has signed a manifest of the run; raises if this peer must not begin the run.
        expected: as for :func:`read_manifest`.
    Raises:
        ConfigError: the manifest is too long for other peers to read.
    """

    dht: DhtNode
    own_id: PeerId
    manifest: RunManifest
    may_begin: Callable[[], Awaitable[None]]
    expected: bytes

    def __post_init__(self) -> None:
        self._tasks = TaskOwner("run manifest")
        self._are_others_told = False
        if (num_bytes := len(self.manifest.encoded())) > MAX_BYTES:
            raise ConfigError(
                f"the settings of the run have {num_bytes} bytes, with the names and shapes of "
                f"{len(self.manifest.tensors)} tensors; at most {MAX_BYTES} can be published: shorten the names, or "
                "train fewer tensors"
            )

    async def agree(self) -> bool:
        """Join the run, or begin it; returns whether no other peer had signed a manifest of the run before.

        Raises:
            ManifestMismatch: this peer's settings differ from those of the run; names both.
            Unavailable: the DHT does not answer.
        """
        if is_first := not await self._compare():
            await self.may_begin()
        await self._publish()
        try:
            await self._compare()  # again: if two peers begin the run at once, both see both manifests now
        except ManifestMismatch:
            await self._withdraw()
            raise
        self._tasks.spawn(self._keep_alive(), name="keeping it alive")
        return is_first

    async def close(self) -> None:
        """Stop signing, so that the settings of a run without trainers expire."""
        await self._tasks.close()
        await self._withdraw()

    async def _compare(self) -> bool:
        """Check this peer's manifest against those of the run and its owner; returns whether another peer signed one.

        Raises:
            ManifestMismatch: it differs from one of them.
        """
        run_id, own = self.manifest.run_id, self.manifest.fingerprint()
        run = await read_manifest(self.dht, run_id, self.expected)
        if run is not None and run.manifest.fingerprint() != own:
            raise ManifestMismatch(run_id, differences(self.manifest, run.manifest))
        if not own.startswith(self.expected):
            here, there = own.hex()[:SHOWN_DIGITS], self.expected.hex()[:SHOWN_DIGITS]
            raise ManifestMismatch(
                run_id, [f"its owner signed other settings (fingerprint {there}, here {here}); ask the owner for these"]
            )
        return run is not None and any(peer_id != self.own_id for peer_id in run.signers)

    async def _store(self, value: bytes | None) -> None:
        await self.dht.store(manifest_key(self.manifest.run_id), value, IDLE_S, subkey=self.own_id)

    async def _publish(self) -> None:
        await self._store(zlib.compress(self.manifest.encoded()))

    async def _withdraw(self) -> None:
        try:
            async with time_limit(BRIEF_S, "withdrawing the run manifest"):
                await self._store(None)
        except ManyhandsError as error:
            logger.debug("the run manifest of this peer expires by itself: %s", error)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(MINUTE_S)
            try:
                await self._publish()
                if not (
                    self.expected or self._are_others_told
                ):  # with an owner, only the manifest that it signed counts
                    await self._look_for_others()
            except ManyhandsError as error:
                logger.warning("The run manifest was not renewed: %s", error)

    async def _look_for_others(self) -> None:
        """Warn once if other peers train a run of the same name with other settings."""
        run_id = self.manifest.run_id
        for manifest, signers in await read_manifests(self.dht, run_id):
            if manifest.fingerprint() != self.manifest.fingerprint():
                self._are_others_told = True
                there = counted(len(signers), "other peer")
                logger.warning(
                    "Two groups of peers train run %s with different settings, and share no work: %s. Start one of "
                    "them again with another --run-id, or with the settings of the other (peers there: %s)",
                    run_id, different_settings(self.manifest, manifest, "here", f"at {there}"), _some(signers),
                )  # fmt: skip
                return


def manifest_key(run_id: str) -> str:
    """The DHT key of a run's manifests."""
    return f"{run_id}.{MANIFEST_KIND}"


class SignedManifest(NamedTuple):
    """The manifest of a run, and the peers that signed it."""

    manifest: RunManifest
    signers: Sequence[PeerId]


def different_settings(one: RunManifest, other: RunManifest, here: str, there: str) -> str:
    """The differences between two manifests of one run, in words.

    Args:
        here, there: where each of them is, for the text.
    """
    lines = differences(one, other)
    return "; ".join(line.replace(" here", f" {here}").replace(" in the run", f" {there}") for line in lines)


def _some(peer_ids: Sequence[PeerId]) -> str:
    return ", ".join(sorted(peer_ids)[:SHOWN_SIGNERS])


async def read_manifest(dht: DhtNode, run_id: str, expected: bytes = b"") -> SignedManifest | None:
    """The manifest that most peers signed, or None. For arguments and errors see :func:`read_manifests`."""
    found = await read_manifests(dht, run_id, expected)
    return found[0] if found else None


async def read_manifests(dht: DhtNode, run_id: str, expected: bytes = b"") -> list[SignedManifest]:
    """The manifest that most peers signed, and that with the second most signers, if there is one.

    Unreadable manifests are skipped. As strangers may publish many, only one decoded manifest is in memory at a time:
    first each is decoded for its fingerprint, and then those that are returned are decoded again.

    Args:
        expected: the run's fingerprint, or the beginning of it, from a ticket. Then no other manifest counts. Without
            it, only the :data:`MAX_DIFFERENT` that most peers signed are read.
    Raises:
        Unavailable: the DHT does not answer.
    """
    signers: defaultdict[Any, list[PeerId]] = defaultdict(list)
    for subkey, stored in (await dht.get(manifest_key(run_id))).items():
        if stored.owner == subkey:
            signers[stored.raw].append(PeerId(subkey))
    values: dict[bytes, Any] = {}  # by fingerprint
    votes: defaultdict[bytes, list[PeerId]] = defaultdict(list)
    different = sorted(signers.items(), key=lambda item: (-len(item[1]), min(item[1])))
    for number, (raw, peer_ids) in enumerate(different if expected else different[:MAX_DIFFERENT], 1):
        if number % DECODED_IN_A_TURN == 0:
            await asyncio.sleep(0)
        try:
            fingerprint = _decode(raw, run_id).fingerprint()
        except (zlib.error, msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            logger.debug("the run manifest of peer %s cannot be read: %s", peer_ids[0], error)
            continue
        if fingerprint.startswith(expected):
            values[fingerprint] = raw
            votes[fingerprint] += peer_ids
    return [SignedManifest(_decode(values[chosen], run_id), votes[chosen]) for chosen in by_signers(votes)[:2]]


def by_signers(signers: Mapping[bytes, Sequence[PeerId]]) -> list[bytes]:
    """The fingerprints by number of signers, the largest first; of equal ones, that with the lowest peer id first."""
    return sorted(signers, key=lambda fingerprint: (-len(signers[fingerprint]), min(signers[fingerprint])))


def _decode(value: bytes, run_id: str) -> RunManifest:
    decompressor = zlib.decompressobj()
    raw = decompressor.decompress(msgspec.msgpack.decode(value, type=bytes), MAX_BYTES)
    if not decompressor.eof:
        raise ValueError(f"it is longer than {MAX_BYTES} bytes, or cut off")
    manifest = msgspec.msgpack.decode(raw, type=RunManifest)
    # values that nest too deeply, say, or have numbers as names, could not be encoded again for a fingerprint
    if len(msgspec.msgpack.encode(manifest.hyper_parameters)) > MAX_HYPER_PARAMETERS_BYTES:
        raise ValueError(f"its hyper-parameters are longer than {MAX_HYPER_PARAMETERS_BYTES} bytes")
    if not is_serializable(manifest.hyper_parameters):
        raise ValueError("its hyper-parameters are not plain values")
    if manifest.run_id != run_id:
        raise ValueError(f"it is of run {readable(manifest.run_id)}")
    return manifest
