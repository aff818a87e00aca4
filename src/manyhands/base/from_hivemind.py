"""Replacements for hivemind's argument names; docs/how-to/from-hivemind.md lists them with the reasons."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from manyhands.base.errors import ConfigError

T = TypeVar("T")

INSTEAD = {  # without a replacement: empty, or ": REASON"
    # of hivemind.Optimizer
    "dht": "peer=manyhands.Peer(initial_peers=[...])",
    "matchmaking_time": "matchmaking_time_s=",
    "averaging_timeout": "averaging_timeout_s=",
    "allreduce_timeout": "",
    "next_chunk_timeout": "",
    "load_state_timeout": "",
    "offload_optimizer": "offload=",
    "delay_optimizer_step": 'delay="optimizer"',
    "delay_grad_averaging": 'delay="gradients"',
    "delay_state_averaging": "",
    "average_state_every": "",
    "average_opt_statistics": "",
    "use_local_updates": "local_steps=manyhands.LocalSteps(outer=lambda params: torch.optim.SGD(params, lr=1.0))",
    "reuse_grad_buffers": ": call zero_grad() as in plain torch",
    "client_mode": "client_mode= of manyhands.Peer",
    "grad_compression": "averaging=AveragingConfig(codec=...)",
    "state_averaging_compression": "",
    "load_state_compression": "",
    "averager_opts": "averaging=AveragingConfig(...)",
    "tracker_opts": "progress=ProgressConfig(...)",
    "grad_averager_factory": "averaging=AveragingConfig(codec=...)",
    "performance_ema_alpha": "",
    "shutdown_timeout": "",
    "verbose": ": logging.basicConfig(level='INFO') shows what happens",
    # of hivemind.CollaborativeOptimizer and hivemind.DecentralizedAverager
    "opt": "the optimizer as the first argument",
    "prefix": "run_id=",
    "averaged_tensors": "the tensors as the first argument",
    "compression": "averaging=AveragingConfig(codec=...)",
    "compression_type": "averaging=AveragingConfig(codec=...)",
    "target_group_size": "averaging=AveragingConfig(max_group_size=...)",
    "min_group_size": "",
    "initial_group_bits": "",
    "min_matchmaking_time": "matchmaking_time_s=",
    "averaging_expiration": "matchmaking_time_s=",
    "request_timeout": "",
    "bandwidth": "averaging=AveragingConfig(bandwidth_mbit_s=...)",
    "part_size_bytes": "averaging=AveragingConfig(chunk_bytes=...)",
    # of hivemind.DHT
    "start": ": it starts when it is made",
    "host_maddrs": "listen=",
    "announce_maddrs": "announce=",
    "identity_path": "identity=",
    "use_relay": "",
    "use_auto_relay": "",
    "use_ipfs": "",
    "num_workers": "",
    "record_validators": "",
    "daemon": "",
}


class FromHivemind:
    """Base of the classes that replace one of hivemind's: the error for a hivemind argument names its replacement.

    Raises:
        ConfigError: an argument has a name that only hivemind uses.
    """

    def __new__(cls: type[T], *args: Any, **named: Any) -> T:
        """Check the names before Python reports an unknown argument."""
        foreign = named.keys() & INSTEAD.keys()
        if foreign and (foreign := foreign - inspect.signature(cls.__init__).parameters.keys()):
            advice = "; ".join(_advice(name, text) for name, text in INSTEAD.items() if name in foreign)
            raise ConfigError(
                f"manyhands.{cls.__name__} has other arguments than hivemind: {advice} (docs/how-to/from-hivemind.md)"
            )
        return object.__new__(cls)


def _advice(name: str, text: str) -> str:
    return f"leave {name}= out{text}" if not text or text.startswith(":") else f"write {text} instead of {name}="
