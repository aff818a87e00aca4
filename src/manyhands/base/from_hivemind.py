"""Replacements for hivemind's names; docs/how-to/from-hivemind.md lists them with the reasons."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from manyhands.base.errors import ConfigError

T = TypeVar("T")
P = ParamSpec("P")
PAGE = "docs/how-to/from-hivemind.md"

# A replacement is what to write instead. An argument without one has an empty text, or ": " and the advice.
INSTEAD = {
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
    "use_local_updates": "local_steps=manyhands.LocalSteps()",
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
    "min_refresh_period": "progress=ProgressConfig(min_refresh_s=...)",
    "max_refresh_period": "progress=ProgressConfig(max_refresh_s=...)",
    **dict.fromkeys(
        ("default_refresh_period", "expected_drift_peers", "expected_drift_rate"),
        ": it has no effect, as the others' progress is read in time without it",
    ),
    "metadata_expiration": "progress=ProgressConfig(ttl_s=...)",
    "batch_size_lead": ": it has no effect, as all peers know the leader of the next step beforehand",
    "step_tolerance": "",
    "accumulate_grads_on": "",
    "average_parameters": "",
    "average_gradients": "",
    "parameter_names": ": give the torch optimizer model.named_parameters()",
    "prefix": "run_id=",
    "averaged_tensors": "the tensors as the first argument",
    "compression": "averaging=AveragingConfig(codec=...)",
    "compression_type": "averaging=AveragingConfig(codec=...)",
    "target_group_size": "averaging=AveragingConfig(max_group_size=...)",
    "min_group_size": "",
    "initial_group_bits": "",
    "min_matchmaking_time": "matchmaking_time_s=",
    "averaging_expiration": "matchmaking_time_s=",
    "averaging_alpha": ": scale the differences yourself, tensor = old + alpha * (tensor - old)",
    "request_timeout": "",
    "sender_timeout": "",
    "reducer_timeout": "",
    "min_vector_size": "",
    "tensor_infos": "",
    "state_compression": "",
    "allow_state_sharing": "",
    "declare_state_period": "",
    "throughput": "averaging=AveragingConfig(bandwidth_mbit_s=...)",
    "bandwidth": "averaging=AveragingConfig(bandwidth_mbit_s=...)",
    "part_size_bytes": "",
    "chunk_size_bytes": "",
    # of hivemind.DHT, its node and its daemon
    "start": ": it starts when it is made",
    "await_ready": ": it has joined when it is made",
    "host_maddrs": "listen=",
    "announce_maddrs": "announce=",
    "listen_on": "listen=",
    "endpoint": "announce=",
    "no_listen": "client_mode=True",
    "identity_path": "identity=",
    "node_id": "identity=",
    "ensure_bootstrap_success": "must_join=",
    "num_replicas": "dht_config=DhtConfig(replicas=...)",
    "bucket_size": "dht_config=DhtConfig(k=...)",
    "wait_timeout": "dht_config=DhtConfig(request_timeout_s=...)",
    "bootstrap_timeout": "dht_config=DhtConfig(join_timeout_s=...)",
    "authorizer": "authorizer= of Peer.coordinate",
    **dict.fromkeys(("use_relay", "use_auto_relay", "use_relay_hop", "use_relay_discovery", "relay_hop_limit"), ""),
    **dict.fromkeys(("trusted_relays", "auto_nat", "nat_port_map", "force_reachability", "use_ipfs", "dht_mode"), ""),
    **dict.fromkeys(("quic", "tls", "conn_manager", "idle_timeout", "startup_timeout", "check_if_identity_free"), ""),
    **dict.fromkeys(("record_validators", "record_validator", "strict", "validate", "p2p", "daemon"), ""),
    **dict.fromkeys(("num_workers", "max_workers", "parallel_rpc", "depth_modulo", "refresh_timeout"), ""),
    **dict.fromkeys(("cache_locally", "cache_nearest", "cache_size", "cache_refresh_before_expiry"), ""),
    **dict.fromkeys(("cache_on_store", "reuse_get_requests", "chunk_size", "blacklist_time", "backoff_rate"), ""),
}

# Attributes of hivemind's objects, and the names in its package, in the same form.
OF_OBJECTS = {
    "shutdown": "close(), or a with block",
    # of hivemind.DHT
    "get_visible_maddrs": "addresses",
    "run_coroutine": "run(coroutine, timeout_s, phase)",
    "add_validators": "dht.declare(key, schema)",
    # of hivemind.Optimizer and hivemind.CollaborativeOptimizer
    "local_epoch": "global_step",
    "local_step": "global_step",
    "tracker": "progress, or global_step",
    "collaboration_state": "progress",
    "state_averager": "inner, the torch optimizer, or scheduler",
    "grad_averager": "",
    "averager": "",
    "is_synchronized_with_peers": "",
    "is_synchronized": "",
    "load_state_from_peers": "manyhands.load_state_from_peers(peer, run_id, into=model) where nothing is trained; a "
    "trainer loads the state by itself",
    # of hivemind.DecentralizedAverager
    "get_tensors": ": change your own tensors between two steps",
}
OF_PACKAGE = {
    "DHT": "manyhands.Peer(initial_peers=[...])",
    "get_dht_time": ": peer.store() takes ttl_s=60, a duration",
    "GradScaler": "torch.amp.GradScaler",
    "CollaborativeOptimizer": "manyhands.Optimizer",
    "DecentralizedAverager": "manyhands.Averager",
    "TrainingAverager": "manyhands.Averager",
    **dict.fromkeys(
        ("NoCompression", "Float16Compression", "Uniform8BitQuantization", "SizeAdaptiveCompression"),
        "averaging=AveragingConfig(codec=...)",
    ),
    "get_logger": ": configure the logging of Python",
    "use_hivemind_log_handler": ": configure the logging of Python",
}


class FromHivemind:
    """Base of the classes that replace one of hivemind's: the error for a hivemind name says what replaces it.

    Such an object is this process's part in the swarm, so it cannot be copied or pickled.

    Raises:
        ConfigError: an argument has a name that only hivemind uses.
        TypeError: an argument has an unknown name; a similar one is named.
        AttributeError: the same of an attribute, when it is read.
    """

    _instead_of_a_copy = "make one in each process"

    def __new__(cls: type[T], *args: Any, **named: Any) -> T:
        """Check the names before Python reports an unknown argument."""
        known = inspect.signature(cls.__init__).parameters
        unknown = named.keys() - known.keys()
        if foreign := unknown & INSTEAD.keys():
            raise _other_arguments(f"manyhands.{cls.__name__}", INSTEAD, foreign)
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
        for name in () if takes_any else sorted(unknown):
            if similar := difflib.get_close_matches(name, known, n=1):
                raise TypeError(
                    f"manyhands.{cls.__name__} got an unexpected keyword argument {name!r}; did you mean {similar[0]}=?"
                )
        return object.__new__(cls)

    if not TYPE_CHECKING:  # otherwise a type checker would accept misspelt names

        def __getattr__(self, name: str) -> Any:
            """Raise ``AttributeError`` for an attribute that the ordinary search has not found."""
            if name in OF_OBJECTS:
                what = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(f"{what}; {advice_for(name, OF_OBJECTS)}")
            return object.__getattribute__(self, name)  # raises again what the search or a property has raised

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``copy`` and ``pickle``."""
        raise ConfigError(
            f"a manyhands.{type(self).__name__} cannot be copied or pickled, as it is this process's part in the "
            f"swarm; {self._instead_of_a_copy}"
        )


def with_advice(**instead: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method: its error for a hivemind argument names the replacement, in the form of :data:`INSTEAD`."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def call(*args: P.args, **named: P.kwargs) -> T:
            if foreign := named.keys() & instead.keys():
                raise _other_arguments(f"manyhands.{method.__qualname__}", instead, foreign)
            return method(*args, **named)

        return call

    return decorate


def advice_for(name: str, instead: Mapping[str, str]) -> str:
    """What to write instead of an attribute of hivemind, from :data:`OF_OBJECTS` or :data:`OF_PACKAGE`."""
    return f"{_advice(name, instead[name])} ({PAGE})"


def _other_arguments(what: str, instead: Mapping[str, str], foreign: set[str]) -> ConfigError:
    advice = "; ".join(_advice(f"{name}=", text) for name, text in instead.items() if name in foreign)
    return ConfigError(f"{what} has other arguments than hivemind: {advice} ({PAGE})")


def _advice(name: str, text: str) -> str:
    if not text or text.startswith(":"):
        return f"leave {name} out{text}"
    return f"write {text} instead of {name}"
