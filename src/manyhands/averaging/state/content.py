"""The state of a peer at one step: all that another peer needs to go on from there, in chunks with digests.

The tensors lie in one block of bytes in the order of the header, each at a multiple of ``LINE_BYTES``, with zeros
between them. The block is cut into chunks of ``CHUNK_BYTES``, which can be downloaded from different peers and checked
one by one (docs/explanation/state.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import msgspec
import torch
from blake3 import blake3

from manyhands.averaging.memory import bytes_of, empty_vector, whole_lines
from manyhands.averaging.messages import Count, Digest, PeerIdText, Position
from manyhands.averaging.roster import Roster
from manyhands.averaging.state.ancestry import MAX_ANCESTRY_BYTES
from manyhands.base.identity import PeerId
from manyhands.base.parameter_spec import ParameterSpec

CHUNK_BYTES = 4 << 20
DIGEST_BYTES = 32
MAX_CONTRIBUTORS = 4096

DTYPES_OF_STATES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""The dtypes of tensors that can be sent to a newcomer."""

DTYPE_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES_OF_STATES}


class Origin(msgspec.Struct, frozen=True):
    """The step that led to a state.

    Attributes:
        parent: the position before it.
        contributors: all peers whose samples may count in it; None if not all are known, as in a grid of groups.
    """

    parent: Position
    contributors: Annotated[list[PeerIdText], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] | None = None


class StateHeader(msgspec.Struct, frozen=True):
    """Describes a state; its tensors follow in this order, as raw little-endian bytes.

    Attributes:
        tensors: parameters first, then extra tensors such as buffers, then the optimizer's, named
            ``parameter.statistic``, then those of an inner optimizer, named ``parameter.inner.statistic``.
        scalars: msgpack of :class:`manyhands.optim.state.state.Scalars`.
        digest: BLAKE3 over ``tensors``, ``scalars`` and the digests of all chunks; empty while these are not known.
        origin: the step that led to the position; None if unknown, as after a checkpoint was loaded.
        ancestry: all steps that led to the position; see :mod:`manyhands.averaging.state.ancestry`.
        roster: the run's roster at the position; empty before the first step, and for an Averager.
        seal: digest from which, with the roster, the lineage is computed; see :mod:`manyhands.averaging.roster`.
    """

    position: Position
    lineage_samples: Count
    tensors: list[ParameterSpec]
    scalars: bytes
    digest: bytes
    origin: Origin | None = None
    ancestry: Annotated[bytes, msgspec.Meta(max_length=MAX_ANCESTRY_BYTES)] = b""
    roster: Roster = Roster()
    seal: Digest = b""


@dataclass(frozen=True)
class State:
    """A state, in memory that nothing else uses.

    Attributes:
        content: all bytes of the tensors, of shape [bytes]; see :func:`offsets_of`.
        digests: BLAKE3 of each chunk; empty while they are not known.
        donors: the peers that sent it, the one that described it first.
        num_bytes: bytes that were received to load it.
    """

    header: StateHeader
    content: torch.Tensor
    digests: Sequence[bytes] = ()
    donors: Sequence[PeerId] = ()
    num_bytes: int = 0

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """Views of the content."""
        specs = self.header.tensors
        starts, _ = offsets_of(specs)
        return [
            self.content[start : start + num_bytes_of(spec)].view(DTYPE_NAMED[spec.dtype]).view(spec.shape)
            for spec, start in zip(specs, starts, strict=True)
        ]

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk; writable."""
        return bytes_of(self.content[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


@dataclass(frozen=True)
class LoadedState:
    """The outcome of loading a state from other peers.

    Attributes:
        global_step: number of global steps behind the loaded parameters; for an Averager, of its rounds.
        samples: number of samples in all these steps; 0 if they are not counted.
        donors: ids of the peers that sent the state.
        num_bytes: number of bytes received.
        seconds: duration of the download.
    """

    global_step: int
    samples: int
    donors: Sequence[PeerId]
    num_bytes: int
    seconds: float


def state_of(header: StateHeader, tensors: Sequence[torch.Tensor]) -> State:
    """A state with copies of these tensors, without digests."""
    state = State(header, empty_content(header.tensors))
    for to, tensor in zip(state.tensors, tensors, strict=True):
        to.copy_(tensor)
    return state


def sealed(state: State) -> State:
    """The same state with its digests."""
    digests = [digest_of_chunk(state.chunk(index)) for index in range(num_chunks_of(state.content.numel()))]
    return with_digests(state, digests)


def with_digests(state: State, digests: Sequence[bytes]) -> State:
    """The same state with these digests of its chunks, and a digest of all in it that does not depend on the donor."""
    root = blake3(msgspec.msgpack.encode([state.header.tensors, state.header.scalars, list(digests)])).digest()
    return replace(state, header=msgspec.structs.replace(state.header, digest=root), digests=tuple(digests))


def digest_of_chunk(chunk: memoryview) -> bytes:
    return blake3(chunk).digest()


def offsets_of(specs: Sequence[ParameterSpec]) -> tuple[list[int], int]:
    """Where each tensor begins in the content, in bytes, and the size of the content; the specs must be checked."""
    starts, end = [], 0
    for spec in specs:
        starts.append(end)
        end = whole_lines(end + num_bytes_of(spec))
    return starts, end


def empty_content(specs: Sequence[ParameterSpec]) -> torch.Tensor:
    """Memory for the tensors of a state, with zeros between them; the specs must be checked."""
    starts, num_bytes = offsets_of(specs)
    content = empty_vector(num_bytes, torch.uint8)
    for spec, start in zip(specs, starts, strict=True):
        end = start + num_bytes_of(spec)
        content[end : whole_lines(end)].zero_()
    return content


def first_of(state: State, num_tensors: int) -> State:
    """The first tensors of a state alone, without digest."""
    specs = state.header.tensors[:num_tensors]
    header = msgspec.structs.replace(state.header, tensors=specs, digest=b"")
    return replace(state, header=header, content=state.content[: offsets_of(specs)[1]], digests=())


def num_chunks_of(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def spec_of(name: str, tensor: torch.Tensor) -> ParameterSpec:
    return ParameterSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def num_bytes_of(spec: ParameterSpec) -> int:
    return math.prod(spec.shape) * DTYPE_NAMED[spec.dtype].itemsize
