"""The ranks of a ``torch.distributed`` job, and the messages between them.

These messages have a gloo group of their own. So they wait for no GPU, and when a rank dies, its sockets close, which
all others notice at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from manyhands.averaging.timing import RANK_S
from manyhands.base.errors import ConfigError, RankLost


class CallOutcome(NamedTuple):
    """Rank 0's message to the other ranks at the end of a call.

    Attributes:
        error: why there is no result; the other attributes are then undefined.
        result: of the call.
        figures: attributes of the peer's optimizer by name.
        options: the options of the parameter groups, such as the learning rate; None if the parameters have not
            changed. Otherwise rank 0 sends the tensors that all ranks hold whole next, with :meth:`Ranks.share`.
    """

    error: Exception | None = None
    result: Any = None
    figures: Any = None
    options: list[dict[str, Any]] | None = None


class Request(NamedTuple):
    """Rank 0's message to the other ranks within a call: what they do with their shards before they wait on.

    Attributes:
        name: of a method of ``manyhands.optim.step.shards.Shards``.
        arguments: of the method.
    """

    name: str
    arguments: tuple[float, ...] = ()


class Ranks:
    """The ranks of the default process group, for one of them.

    All methods raise ``RankLost`` if another rank is gone, or does not make the same call in time.
    """

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "there are no ranks: start the program with torchrun --nproc-per-node N, and call "
                "torch.distributed.init_process_group() first; a process by itself needs manyhands.Optimizer only"
            )
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        with self._lost("formed the group for messages"):
            self._words: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timedelta(seconds=RANK_S))

    def abandon(self) -> None:
        """Leave the other ranks: what they send to this one, or wait for, fails at once, and so do all later calls."""
        words, self._words = self._words, None
        if words is not None:
            dist.destroy_process_group(words)

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._words is None:
            raise RankLost(
                f"rank {self.rank} of {self.num_ranks} failed in the midst of a message, and left the others"
            )
        return self._words

    def gather(self, own: Any) -> list[Any]:
        """Send this rank's value to all ranks; returns the values of all ranks."""
        said: list[Any] = [None] * self.num_ranks
        with self._lost("waited for all ranks to make the same call"):
            dist.all_gather_object(said, own, group=self._group)
        return said

    def broadcast(self, message: CallOutcome | Request | None) -> CallOutcome | Request:
        """Send a message from rank 0 to all ranks; returns it. On the others the argument is None."""
        said = [message]
        with self._lost("sent them the result of a call" if self.rank == 0 else "waited for the result of rank 0"):
            dist.broadcast_object_list(said, src=0, group=self._group)
        assert said[0] is not None
        return said[0]

    def agree(self, *, is_so: bool) -> bool:
        """Whether it is so on all ranks. All ranks must call this."""
        flag = torch.tensor(int(is_so))
        with self._lost("compared their gradients"):
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    @torch.no_grad()
    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors of rank 0 to all ranks, over the job's own process group. All ranks must call this."""
        with self._lost("copied the parameters of rank 0"):
            for tensor in tensors:
                dense = tensor.detach().contiguous()
                dist.broadcast(dense, src=0)
                if self.rank != 0 and not tensor.is_contiguous():
                    tensor.copy_(dense)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to another rank, which must receive one of the same shape and dtype. Copies it to the host."""
        with self._lost(f"sent a shard to rank {to}"):
            dist.send(tensor.detach().cpu().contiguous(), to, group=self._group)

    def receive(self, into: torch.Tensor, dtype: torch.dtype, sender: int) -> None:
        """Receive a tensor of a dtype from another rank, and write its values into a tensor of the same shape."""
        is_whole = into.is_cpu and into.dtype == dtype and into.is_contiguous()
        received = into if is_whole else torch.empty(into.shape, dtype=dtype)
        with self._lost(f"received a shard of rank {sender}"):
            dist.recv(received, sender, group=self._group)
        if received is not into:
            into.copy_(received)

    @contextmanager
    def _lost(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # both gloo and NCCL raise it
            raise RankLost(
                f"rank {self.rank} of {self.num_ranks} lost other ranks while it {doing}: {error}"
            ) from error
