"""What a peer says of itself when it joins a run."""

from __future__ import annotations

from manyhands.averaging.config import AveragingConfig
from manyhands.optim.manifest import RunManifest
from manyhands.optim.schedule import describe
from manyhands.optim.state.state import hyper_parameters_of, names_of, parameters_of, specs_of
from manyhands.optim.step.replica import Replica

PROTOCOL = "manyhands/1"


def manifest_of(
    replica: Replica, run_id: str, target_batch_size: int, averaging: AveragingConfig, extra: dict[str, str]
) -> RunManifest:
    """The settings of this peer, as all others must have them."""
    if averaging.max_group_size != AveragingConfig.max_group_size:
        extra = extra | {"max_group_size": str(averaging.max_group_size)}
    optimizer = replica.optimizer
    groups = hyper_parameters_of(optimizer.param_groups)
    for group in groups:
        group.pop("param_names", None)  # they are in the tensors' specs
        group["lr"] = group.pop("initial_lr", group["lr"])
    named = zip(names_of(optimizer), parameters_of(optimizer), strict=True)
    return RunManifest(
        protocol=PROTOCOL,
        run_id=run_id,
        target_batch_size=target_batch_size,
        tensors=specs_of(optimizer),
        frozen=[name for name, parameter in named if not parameter.requires_grad],
        optimizer=type(optimizer).__name__,
        hyper_parameters=groups,
        scheduler=describe(replica.scheduler),
        codec=averaging.codec,
        extra=extra,
    )
