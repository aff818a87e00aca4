"""The settings of one peer, as the manifest of the run that it joins must have them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from manyhands.averaging.config import AveragingConfig
from manyhands.optim.manifest import RunManifest
from manyhands.optim.serializable import is_plain
from manyhands.optim.state.state import hyper_parameters_of, names_of, parameters_of, specs_of
from manyhands.optim.step.replica import Replica

PROTOCOL = "manyhands/1"
_PROGRESS = {"last_epoch", "base_lrs"}  # of a schedule: what moves, or is in the hyper-parameters already


def manifest_of(
    replica: Replica, run_id: str, target_batch_size: int, averaging: AveragingConfig, extra: dict[str, str]
) -> RunManifest:
    """The settings of this peer, which all peers of the run must have alike."""
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
        scheduler=described_schedule(replica.scheduler),
        codec=averaging.codec,
        extra=extra,
    )


def described_schedule(scheduler: Any) -> str:
    """A torch scheduler's class and constants, with those of the schedulers inside it; empty for None.

    Functions, as in ``LambdaLR``, have no constants: what they do cannot be compared.
    """
    if scheduler is None:
        return ""
    state = scheduler.state_dict()
    constants = {name: state[name] for name in sorted(state) if not name.startswith("_") and name not in _PROGRESS}
    constants = {
        name: sorted(value.elements()) if isinstance(value, Counter) else value for name, value in constants.items()
    }
    parts = [f"{name}={value}" for name, value in constants.items() if is_plain(value)]
    if "_milestones" in state:
        parts.append(f"milestones={state['_milestones']}")
    parts += [described_schedule(inner) for inner in getattr(scheduler, "_schedulers", [])]
    return f"{type(scheduler).__name__}({', '.join(parts)})"
