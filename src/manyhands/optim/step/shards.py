"""A model that FSDP2 has split over the ranks of one peer: ``fully_shard`` makes each parameter a ``DTensor``.

Each rank has a *shard* of each parameter, which is a slice along one dimension, and of its gradient. Rank 0 has a copy
of the whole parameters on the host, on which the wrapped optimizer steps, as with ``offload``. So it is a peer like any
other: its averages, states, checks and digests are those of whole tensors, whatever the layout of the other peers.

1. For each batch, each rank adds its shard of the gradient to a mean of its own (``add``).
2. When a global step is due, rank 0 gathers these means, shard by shard, into its vector (``send_gradients``).
3. After the update, and whenever else the copy has changed, each rank gets its shards (``receive_parameters``).
4. If something else has written to the model, rank 0 gathers the parameters (``send_parameters``).

Rank 0 asks for each of these within a call that all ranks make together. The others wait for the outcome of the call,
and meanwhile carry out what rank 0 asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from manyhands.base.errors import ConfigError
from manyhands.optim.accumulator import Contribution, GradientAccumulator, add_gradients
from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.flat import FlatGradients, GradientLayout, are_finite
from manyhands.optim.model_checks import models_of
from manyhands.optim.options import is_sharded
from manyhands.optim.ranks import Ranks, Request
from manyhands.optim.step.host_copy import HOST, HostCopy, copy_on_host, take_over

MESH = 'mesh=torch.distributed.device_mesh.init_device_mesh("cuda", (num_ranks,))'


def check_shards(named: Sequence[tuple[str, torch.Tensor]], num_ranks: int) -> None:
    """Raise ``ConfigError`` unless each parameter is split over all ranks, along one dimension of its own."""
    for name, parameter in named:
        if not is_sharded(parameter):
            raise ConfigError(
                f"{name} is whole on each rank, while other parameters are split (FSDP2): split all that the optimizer "
                "has, with fully_shard(model) after fully_shard() of its parts, and without ignored_params"
            )
        mesh, placements = cast(Any, parameter).device_mesh, cast(Any, parameter).placements
        if mesh.ndim != 1:
            raise ConfigError(
                f"{name} is on a mesh of {mesh.ndim} dimensions (HSDP, or FSDP2 with tensor parallel), which is not "
                f"supported: split the model over all {num_ranks} ranks, with fully_shard(model, {MESH})"
            )
        if mesh.mesh.tolist() != list(range(num_ranks)):
            raise ConfigError(
                f"{name} is split over the ranks {mesh.mesh.tolist()}, and the job has {num_ranks}: split the model "
                f"over all of them in order, with fully_shard(model, {MESH})"
            )
        if not placements[0].is_shard():
            raise ConfigError(
                f"{name} is a DTensor that is not split (its placement is {placements[0]}): split it with fully_shard()"
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a ``DTensor``, as an ordinary tensor in the same memory."""
    with torch.no_grad():
        return cast(torch.Tensor, cast(Any, tensor).to_local()).detach()


class Shards:
    """The parameters of an optimizer, and the mean of their gradients, on one rank of the job. All ranks make one.

    Rank 0 calls the public methods, within :meth:`leading`; the others call :meth:`follow`.

    Args:
        parameters: of the optimizer, as :func:`check_shards` accepts them.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[torch.Tensor]) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._ranks = ranks
        self._parameters = list(parameters)
        self._trained = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
        self._dims = [cast(Any, parameter).placements[0].dim for parameter in parameters]
        lengths = [local_of(one).shape[dim] for one, dim in zip(parameters, self._dims, strict=True)]
        self._lengths: list[list[int]] = ranks.gather(lengths)  # by rank, of the shard of each parameter
        self._layout = GradientLayout([local_of(parameters[index]) for index in self._trained])
        self._mean: FlatGradients | None = None  # the mean of this rank's gradients since rank 0 has gathered them
        modules = (module for model in models_of(parameters) for module in model.modules())
        self._modules = [module for module in modules if isinstance(module, FSDPModule)]
        self._is_leading = False
        self.is_moving = False  # whether shards are under way, so that the ranks expect no other message

    # on rank 0

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Within the block, the other ranks wait for rank 0, and do what it asks for."""
        self._is_leading = True
        try:
            yield
        finally:
            self._is_leading = False

    def add(self, share: float, grad_scale: float) -> bool:
        """Move the mean of the gradients towards the current ones; returns False if one of these is not finite.

        Args:
            share: of the current gradients in the new mean; with 1 they take its place.
            grad_scale: the factor by which the loss was multiplied; the gradients are divided by it.
        """
        self._ask("_add", share, grad_scale)
        return self._add(share, grad_scale)

    def gather_gradients(self, into: FlatGradients) -> None:
        """Gather the mean of the gradients, whole."""
        with self._moving("_send_gradients"):
            self._send_gradients(into)

    def whole_parameters(self) -> Iterator[torch.Tensor]:
        """Gather the parameters: each whole, in a new tensor on the host. The caller must take all of them."""
        with self._moving("_send_parameters"):
            for index, parameter in enumerate(self._parameters):
                whole = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._to_rank_0(index, local_of(parameter), whole)
                yield whole

    def distribute(self, wholes: Sequence[torch.Tensor]) -> None:
        """Give all ranks their shards of whole parameters."""
        with self._moving("_receive_parameters"):
            self._receive_parameters(wholes)

    @contextmanager
    def _moving(self, name: str) -> Iterator[None]:
        self._ask(name)
        self.is_moving = True
        yield
        self.is_moving = False  # not after an error: then the other ranks still wait for the rest

    def _ask(self, name: str, *arguments: float) -> None:
        if not self._is_leading:
            raise ConfigError(
                "FSDP2 has split the parameters over the ranks, so all ranks must take part: call the method of the "
                "same name of manyhands.ProcessGroupOptimizer on all of them, in place of that of its leader"
            )
        self._ranks.broadcast(Request(name, arguments))

    # on the other ranks

    def follow(self, request: Request) -> None:
        """Do what rank 0 asks for. If this rank fails, all lose it at once."""
        try:
            getattr(self, request.name)(*request.arguments)
        except BaseException:
            self._ranks.abandon()
            raise

    # on all ranks

    def _add(self, share: float, grad_scale: float) -> bool:
        gradients = [self._parameters[index].grad for index in self._trained]
        shards = [gradient if gradient is None else local_of(gradient) for gradient in gradients]
        if not self._ranks.agree(is_so=are_finite([shard for shard in shards if shard is not None])):
            return False
        if self._mean is None:
            self._mean = self._layout.empty(local_of(self._parameters[self._trained[0]]).device)
        add_gradients(self._mean, shards, grad_scale, share)
        return True

    def _send_gradients(self, into: FlatGradients | None = None) -> None:
        assert self._mean is not None, "gradients were added"
        wholes = into.values if into is not None else [None] * len(self._trained)
        for index, mean, whole in zip(self._trained, self._mean.values, wholes, strict=True):
            self._to_rank_0(index, mean, whole)
        if into is not None:
            into.shares.copy_(self._mean.shares)

    def _send_parameters(self) -> None:
        for index, parameter in enumerate(self._parameters):
            self._to_rank_0(index, local_of(parameter), None)

    def _receive_parameters(self, wholes: Sequence[torch.Tensor | None] | None = None) -> None:
        wholes = wholes if wholes is not None else [None] * len(self._parameters)
        for index, (parameter, whole) in enumerate(zip(self._parameters, wholes, strict=True)):
            self._from_rank_0(index, local_of(parameter), whole)
        for module in self._modules:  # after a forward pass without a backward pass it would use the old values again
            module.reshard()

    def _to_rank_0(self, index: int, shard: torch.Tensor, whole: torch.Tensor | None) -> None:
        if whole is None:
            if shard.numel():
                self._ranks.send(shard, 0)
            return
        own, *others = self._split(index, whole)
        own.copy_(shard)
        for sender, part in enumerate(others, 1):
            if part.numel():
                self._ranks.receive(part, shard.dtype, sender)

    def _from_rank_0(self, index: int, shard: torch.Tensor, whole: torch.Tensor | None) -> None:
        if whole is None:
            if shard.numel():
                self._ranks.receive(shard, shard.dtype, 0)
            return
        own, *others = self._split(index, whole.detach())
        shard.copy_(own)
        for receiver, part in enumerate(others, 1):
            if part.numel():
                self._ranks.send(part.to(shard.dtype), receiver)

    def _split(self, index: int, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The shards of a whole parameter by rank, as views of it."""
        return torch.split(whole, [lengths[index] for lengths in self._lengths], self._dims[index])


class WholeCopy(HostCopy):
    """Makes the optimizer of rank 0 work on whole copies of the parameters, on the host and in float32 or wider."""

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Shards) -> None:
        self._shards = shards
        super().__init__(optimizer)

    def _copied(self) -> list[torch.Tensor]:
        wholes = zip(self._model_parameters, self._shards.whole_parameters(), strict=True)
        return [copy_on_host(whole.requires_grad_(parameter.requires_grad)) for parameter, whole in wholes]

    def copy_to_model(self) -> None:
        """Give all ranks their shards of the copies, and copy the optimizer's options to the shown groups."""
        self._shards.distribute(self._copies)
        self.show_options()

    @torch.no_grad()
    def take_over(self, finer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Copy the model's parameters to the copies, after something has written to them; see ``HostCopy``."""
        for index, (copy, whole) in enumerate(zip(self._copies, self._shards.whole_parameters(), strict=True)):
            if finer is not None and f"{index}" in finer:
                copy.copy_(finer[f"{index}"])
            take_over(whole, copy)

    def remove(self) -> None:
        """Have the optimizer work on the model's own parameters again, without its statistics: no rank has shards of
        these."""
        originals = iter(self._model_parameters)
        for group in self._optimizer.param_groups:
            group["params"] = [next(originals) for _ in group["params"]]
        self._optimizer.state.clear()


class ShardedAccumulator(GradientAccumulator):
    """The gradient of the mean loss over all samples of a peer, which its ranks accumulate in shards.

    Memory on each rank: one float32 vector of the size of its shards, on their device. On rank 0 a contribution is a
    whole vector, on the host.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], extra: ExtraTensors, shards: Shards) -> None:
        super().__init__(parameters, extra)
        self._shards = shards
        self._weight_in_shards = 0.0  # ``weight`` is that of what this peer has taken back

    def add(self, samples: int, weight: float | None = None, grad_scale: float = 1.0, at_step: int = 0) -> bool:
        weight = float(samples) if weight is None else weight
        if weight > 0:
            if not self._shards.add(weight / (self._weight_in_shards + weight), grad_scale):
                return False
            self._weight_in_shards += weight
        self._count(samples, at_step)
        return True

    def freeze(self) -> Contribution:
        if self._weight_in_shards > 0:
            spare_N, self._spare_N = self._spare_N, None
            gathered = self.layout.empty(HOST) if spare_N is None else self.layout.views(spare_N)
            self._shards.gather_gradients(gathered)
            weight, self._weight_in_shards = self._weight_in_shards, 0.0
            self._merge(gathered.flat_N, weight)
        return super().freeze()

    def drop(self) -> None:
        super().drop()
        self._weight_in_shards = 0.0

    def _home(self) -> torch.device:
        return HOST
