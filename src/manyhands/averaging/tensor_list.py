"""Maps a fixed list of a user's tensors to one flat vector, and back.

The functions at the end find tensors that share memory, which cannot be averaged one by one.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
import torch

from manyhands.averaging.codecs import is_finite
from manyhands.averaging.memory import Memory
from manyhands.base.errors import ConfigError
from manyhands.runtime.interrupts import uninterrupted

T = TypeVar("T")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_SUMMARY_LENGTH = 200


class TensorSpec(msgspec.Struct, frozen=True):
    """The properties of a tensor that must be equal on all members.

    Attributes:
        dtype: its name, such as ``float32``.
        device: the kind of device, such as ``cpu`` or ``cuda``.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on {self.device}"


class TensorList:
    """Checks the tensors, copies their values out, and writes others in.

    Args:
        tensors: dense, of float16, bfloat16, float32 or float64, on any device, contiguous or not.
    Raises:
        ConfigError: the list is empty, or one of the tensors cannot be averaged; names it and the reason.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        if isinstance(tensors, torch.Tensor):
            raise ConfigError("tensors is one tensor; give a list of tensors, for example [tensor]")
        if not isinstance(tensors, Iterable):
            raise ConfigError(f"tensors is of type {type(tensors).__name__}; give tensors, such as model.parameters()")
        self._tensors = list(tensors)
        if not self._tensors:
            raise ConfigError("tensors is an empty list; give at least one tensor, for example [torch.zeros(3)]")
        for number, tensor in enumerate(self._tensors):
            _check(number, tensor)
        if pair := overlapping(self._tensors):
            raise ConfigError(
                f"tensors {pair[0]} and {pair[1]} share memory, or are interleaved in it; "
                "give each value once, and the base instead of interleaved views of it"
            )
        self.specs = [_spec_of(tensor) for tensor in self._tensors]
        is_double = any(tensor.dtype == torch.float64 for tensor in self._tensors)
        self._dtype = torch.float64 if is_double else torch.float32
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self.numel = sum(self._sizes)
        self._memory = Memory()
        self._writing = threading.Lock()

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the tensors, in their order in the vector."""
        return [tensor.shape for tensor in self._tensors]

    def fingerprint(self) -> bytes:
        """SHA-256 of all specs: equal for lists that can be averaged."""
        return hashlib.sha256(msgspec.msgpack.encode(self.specs)).digest()

    def summary(self) -> str:
        """The list in a few words, for peers whose list differs."""
        text = f"{len(self.specs)} with {self.numel} values: " + ", ".join(str(spec) for spec in self.specs[:8])
        is_cut = len(text) > MAX_SUMMARY_LENGTH or len(self.specs) > 8
        return text[: MAX_SUMMARY_LENGTH - 3] + "..." if is_cut else text

    def values(self) -> torch.Tensor:
        """All values as one vector on the CPU, shape [numel]: float64 if one of the tensors is, else float32.

        It is a copy, because another thread may free or resize a tensor during a send. Its memory is used again later.

        Raises:
            ConfigError: a tensor has changed.
        """
        self.check_unchanged()
        flat_N = self._memory.vector(self.numel, self._dtype)
        with torch.no_grad():
            for tensor, part in zip(self._tensors, flat_N.split_with_sizes(self._sizes), strict=True):
                part.view(tensor.shape).copy_(tensor.detach())
        return flat_N

    def check_finite(self, flat_N: torch.Tensor) -> None:
        """Check values before they are sent.

        Raises:
            ConfigError: a value is infinite or NaN; names the tensor.
        """
        if is_finite(flat_N):
            return
        number = next(number for number, part in enumerate(flat_N.split_with_sizes(self._sizes)) if not is_finite(part))
        raise ConfigError(
            f"tensor {number} has a value that is infinite or NaN, and nothing was sent; "
            "repair it, or take part with weight=0.0 to get the mean of the others"
        )

    def assign(self, flat_N: torch.Tensor) -> None:
        """Write new values into the tensors, also during Ctrl-C; their dtypes and devices stay.

        Raises:
            ConfigError: a tensor has changed; nothing is written.
        """
        parts = zip(flat_N.split_with_sizes(self._sizes), self.specs, strict=True)
        self.assign_each([part.view(spec.shape) for part, spec in parts])

    def assign_each(self, values: Sequence[torch.Tensor]) -> None:
        """Like :meth:`assign`, with a tensor of values for each tensor."""
        self.check_unchanged()
        with self._writing, uninterrupted(), torch.no_grad():
            for tensor, value in zip(self._tensors, values, strict=True):
                tensor.detach().copy_(value)

    def between_writes(self, read: Callable[[Sequence[torch.Tensor]], T]) -> T:
        """Call a function with all tensors, while no values are written here; any thread may.

        Raises:
            ConfigError: a tensor has changed.
        """
        self.check_unchanged()
        with self._writing, torch.no_grad():
            return read([tensor.detach() for tensor in self._tensors])

    def check_unchanged(self) -> None:
        """Check that each tensor still has its shape, dtype, device and memory."""
        for number, (tensor, spec) in enumerate(zip(self._tensors, self.specs, strict=True)):
            if (now := _spec_of(tensor)) != spec:
                raise ConfigError(
                    f"tensor {number} was {spec} and is {now} now, and it was not written; "
                    "an Averager is for fixed tensors: make another one for the new list"
                )
            if tensor.numel() and tensor.untyped_storage().nbytes() < end_of(tensor):
                raise ConfigError(f"the memory of tensor {number} was freed, and it was not written")


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device.type)


def _check(number: int, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"tensor {number} is a {type(tensor).__name__}; a torch.Tensor is needed")
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise ConfigError(f"tensor {number} is {tensor.dtype}; those that can be averaged are {names}")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ConfigError(f"tensor {number} is {tensor.layout} on {tensor.device}; a dense one with memory is needed")
    if tensor.is_inference():
        raise ConfigError(f"tensor {number} was made in inference mode, and cannot be written; give a clone of it")
    if tensor.requires_grad and not tensor.is_leaf:
        raise ConfigError(f"tensor {number} is the result of a computation with gradients; give tensor.detach()")
    if overlaps_itself(tensor):
        raise ConfigError(f"several values of tensor {number} share memory, as after expand(); give a clone of it")


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two values may share an address; never true for tensors made by slicing and transposing."""
    if not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def end_of(tensor: torch.Tensor) -> int:
    """End of the last value, in bytes from the beginning of the storage; the tensor is not empty."""
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return int(tensor.storage_offset() + reach + 1) * tensor.element_size()


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """The indices of two dense tensors that share memory or interleave in it; None if there are none."""
    ranges = []
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            base = tensor.untyped_storage().data_ptr()
            begin = base + tensor.storage_offset() * tensor.element_size()
            ranges.append((str(tensor.device), begin, base + end_of(tensor), number))
    ranges.sort()
    for (device, _, end, number), (other_device, begin, _, other) in itertools.pairwise(ranges):
        if device == other_device and begin < end:
            return min(number, other), max(number, other)
    return None
