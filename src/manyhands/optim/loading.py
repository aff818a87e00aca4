"""Loads a run's model into a peer that does not train, such as an evaluator."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.state.content import LoadedState, State, StateHeader, sealed, state_of
from manyhands.averaging.timing import DAY_S, TWO_DIALS_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, ManifestMismatch, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.parameter_spec import ParameterSpec, bare_names
from manyhands.base.run_id import checked_run_id
from manyhands.base.text import counted
from manyhands.optim.flat import are_finite
from manyhands.optim.manifest import REST_OF_MODEL, RunManifest, read_manifest
from manyhands.optim.rest_of_model import facts_of_rest
from manyhands.optim.run.belief import believed_by_a_newcomer
from manyhands.optim.run.progress import ProgressReader, branch_order
from manyhands.optim.run.reached_networks import ReachedNetworks
from manyhands.optim.run.run_records import declare_run
from manyhands.optim.state.catching_up import download_state
from manyhands.peer import Peer, check_peer
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import readable
from manyhands.runtime.executor import run_to_end

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_POSITIONS = 4  # whose states are tried, from the highest on


def load_state_from_peers(peer: Peer, run_id: str, *, into: torch.nn.Module, timeout_s: float = DAY_S) -> LoadedState:
    """Load the current parameters and shared buffers of a run into a model, without taking part in the run.

    Nobody waits for this peer, and it signs and publishes nothing. It downloads from several peers at once, and only
    what the model does not hold already.

    Args:
        into: a model whose parameters have the names and shapes of those of the run. It may be on a GPU, or of another
            precision.
        timeout_s: limit for the download, in seconds.
    Raises:
        ConfigError: this peer's ticket is for another run, or it is banned.
        ManifestMismatch: the model has other parameters; names them.
        Unavailable: nobody trains this run, or no peer could send its state. The model is unchanged.
        Timeout: the download took longer than ``timeout_s``.
    """
    check_peer(peer)
    checked_run_id(run_id)
    if not isinstance(into, torch.nn.Module):
        raise ConfigError(f"into is of type {type(into).__name__}; give the model, a torch.nn.Module")
    return peer.run(_load(peer, run_id, into), timeout_s + TWO_DIALS_S, f"loading the state of run {run_id!r}")


async def _load(peer: Peer, run_id: str, model: torch.nn.Module) -> LoadedState:
    presence, begun = peer.presence, asyncio.get_running_loop().time()
    try:
        async with time_limit(TWO_DIALS_S, f"looking for run {run_id!r}"):
            manifest = await _manifest_of(peer, run_id)
            reader = ProgressReader(presence.endpoint, presence.dht, run_id)
            await reader.refresh()
    except Timeout as error:
        raise Unavailable(str(error)) from error
    parameters = matching_parameters(model, manifest)
    buffers = _bare(model.named_buffers())
    rest = await run_to_end(facts_of_rest, model, parameters)
    if REST_OF_MODEL in manifest.extra and rest.get(REST_OF_MODEL) != manifest.extra[REST_OF_MODEL]:
        logger.warning(
            "The run trains a part of its model, and the other parameters are not the same here (%s, and %s in the "
            "run). This is not the model of the run, unless these parameters differ in precision only",
            rest.get(REST_OF_MODEL, "none"),
            readable(manifest.extra[REST_OF_MODEL]),
        )
    targets = [*parameters, *(buffers.get(spec.name) for spec in manifest.extra_tensors)]
    held = await run_to_end(_held, manifest.tensors, parameters)
    all_records = reader.records()
    records, failure = askable(all_records, presence.endpoint), "nobody trains it now"
    if all_records:
        failure = f"none of the {len(all_records)} peers that train it can be dialled from here"
    networks = ReachedNetworks(presence.endpoint, presence.dht.initial_peers)
    try:
        for _ in range(MAX_POSITIONS):
            if (leading := await leading_donors(records, networks, presence.rng, presence.dht.initial_peers())) is None:
                break
            position, donors = leading
            try:
                state = await download_state(
                    presence.endpoint, manifest, donors, position,
                    is_onlooker=True, held=held, num_tensors=len(targets),
                )  # fmt: skip
                if fault := await run_to_end(_assign, state, targets):
                    raise Unavailable(f"the state of peer {', '.join(state.donors)} cannot be used: {fault}")
            except Unavailable as error:
                failure = str(error)
                records = {peer_id: record for peer_id, record in records.items() if peer_id not in donors}
                continue
            header, took_s = state.header, asyncio.get_running_loop().time() - begun
            return LoadedState(header.position.step, header.lineage_samples, state.donors, state.num_bytes, took_s)
    finally:
        await networks.close()
    raise Unavailable(f"the state of run {run_id!r} cannot be loaded: {failure}")


async def _manifest_of(peer: Peer, run_id: str) -> RunManifest:
    presence = peer.presence
    await presence.check_run(run_id)
    declare_run(presence.dht, run_id)
    signed = await read_manifest(presence.dht, run_id, presence.signed_manifests().get(run_id, b""))
    if signed is None:
        raise Unavailable(
            f"nobody trains run {run_id!r}: no settings of it were found at the "
            f"{counted(presence.dht.num_known_peers, 'peer')} of this network that this one knows; check the run id"
        )
    return signed.manifest


def askable(records: Mapping[PeerId, PeerRecord], endpoint: Endpoint) -> dict[PeerId, PeerRecord]:
    """The records of peers that this one can ask; those in client mode must be connected to it."""
    return {
        peer_id: record for peer_id, record in records.items() if not record.is_client or endpoint.carries_bulk(peer_id)
    }


async def leading_donors(
    records: Mapping[PeerId, PeerRecord], networks: ReachedNetworks, rng: random.Random, trusted: frozenset[PeerId]
) -> tuple[Position, list[PeerId]] | None:
    """The position of the run that a peer believes which does not train, and the peers that hold its state.

    None if nobody has a vote.

    Args:
        trusted: the initial peers; see :mod:`manyhands.optim.run.belief`.
    """
    while not (believed := believed_by_a_newcomer(records, trusted, networks.poll)):
        if not await networks.brings_news():
            return None
    position = max(believed.values(), key=branch_order).position
    donors = [peer_id for peer_id, record in believed.items() if record.position == position]
    rng.shuffle(donors)
    donors.sort(key=lambda peer_id: not believed[peer_id].is_auxiliary)  # trainers last: they need their own links
    return position, donors


def matching_parameters(model: torch.nn.Module, manifest: RunManifest) -> list[torch.nn.Parameter]:
    """The parameters of a model in the order of the run.

    Raises:
        ManifestMismatch: the run has others.
    """
    named, buffers = _bare(model.named_parameters()), _bare(model.named_buffers())
    names = [spec.name for spec in manifest.tensors]
    if names == [f"parameter {index}" for index in range(len(named))]:  # the trainers' optimizer has no names
        named = dict(zip(names, named.values(), strict=True))
    differences = [f"the model has no tensor {readable(name)}" for name in names if name not in named]
    differences += [
        f"{what} {spec.name} has shape {list(own[spec.name].shape)} here, {list(spec.shape)} in the run"
        for what, own, specs in (("tensor", named, manifest.tensors), ("buffer", buffers, manifest.extra_tensors))
        for spec in specs
        if spec.name in own and tuple(own[spec.name].shape) != tuple(spec.shape)
    ]
    differences += [
        f"the run does not train tensor {name}"
        for name, parameter in named.items()
        if parameter.requires_grad and name not in set(names)
    ]
    if differences:
        shown, more = differences[:3], len(differences) - 3
        raise ManifestMismatch(manifest.run_id, [*shown, *([f"and {more} more"] if more > 0 else [])])
    return [named[name] for name in names]


def _bare(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The parameters or buffers of a model by their names in the run."""
    pairs = list(named)
    return dict(zip(bare_names(name for name, _ in pairs), (tensor for _, tensor in pairs), strict=True))


def _held(specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter]) -> State | None:
    """The model's parameters as a state, so that equal ones are not downloaded; None if dtypes differ."""
    if any(str(parameter.dtype) != f"torch.{spec.dtype}" for spec, parameter in zip(specs, parameters, strict=True)):
        return None
    header = StateHeader(Position(0, b""), 0, list(specs), b"", b"")
    return sealed(state_of(header, [parameter.detach() for parameter in parameters]))


def _assign(state: State, targets: Sequence[torch.Tensor | None]) -> str:
    """Copy a state to the targets that are not None; returns why it cannot be used, empty if it can."""
    if not are_finite([tensor for tensor in state.tensors if tensor.is_floating_point()]):
        return "it has values that are not finite"
    with torch.no_grad():
        for target, tensor in zip(targets, state.tensors, strict=True):
            if target is not None:
                target.copy_(tensor)
    return ""
