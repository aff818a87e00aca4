"""Names that only hivemind has are told what takes their place."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands
from manyhands.base.errors import ConfigError
from manyhands.base.from_hivemind import INSTEAD, OF_OBJECTS, OF_PACKAGE, FromHivemind

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "from-hivemind.md"


class Model(FromHivemind):
    def __init__(self, size: int, *, client_mode: bool = False) -> None:
        self.size = size

    @property
    def faulty(self) -> int:
        return self.size.no_such_thing  # type: ignore[attr-defined,no-any-return]


class AnyModel(Model):
    def __init__(self, **named: Any) -> None:
        super().__init__(named.pop("size", 0))
        self.named = named


def inner() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


CALLS: list[tuple[Any, dict[str, Any], str]] = [
    (manyhands.Optimizer, {"dht": object()}, r"write peer=manyhands.Peer\(initial_peers=\[...\]\) instead of dht="),
    (
        manyhands.Optimizer,
        {"peer": 1, "matchmaking_time": 3.0},
        "matchmaking_time_s= instead of matchmaking_time=",
    ),
    (
        manyhands.Optimizer,
        {"peer": 1, "reuse_grad_buffers": True},
        r"reuse_grad_buffers= out: call zero_grad\(\)",
    ),
    (manyhands.Optimizer, {"client_mode": True}, "write client_mode= of manyhands.Peer instead of client_mode="),
    (manyhands.ProcessGroupOptimizer, {"dht": object()}, "manyhands.ProcessGroupOptimizer has other arguments"),
    (manyhands.Averager, {"dht": object(), "prefix": "x"}, "instead of dht=; write run_id= instead of prefix="),
    (
        manyhands.Optimizer,
        {"peer": 1, "metadata_expiration": 60.0, "step_tolerance": 1},
        r"progress=ProgressConfig\(ttl_s=...\) instead of metadata_expiration=; leave step_tolerance= out",
    ),
    (manyhands.Optimizer, {"peer": 1, "batch_size_lead": 300}, "leave batch_size_lead= out: it has no effect"),
    (manyhands.Optimizer, {"peer": 1, "expected_drift_peers": 3}, "leave expected_drift_peers= out: it has no effect"),
    (manyhands.Averager, {"peer": 1, "averaging_alpha": 0.5}, "leave averaging_alpha= out: scale the differences"),
    (manyhands.Averager, {"peer": 1, "allow_state_sharing": True}, "leave allow_state_sharing= out"),
    (manyhands.Peer, {"ensure_bootstrap_success": False}, "write must_join= instead of ensure_bootstrap_success="),
    (manyhands.Peer, {"start": True, "host_maddrs": []}, "leave start= out: .*; write listen= instead of host_maddrs="),
]


@pytest.mark.parametrize(("kind", "named", "says"), CALLS)
def test_arguments_of_hivemind_constructors_are_refused_with_what_to_write(
    kind: Any, named: dict[str, Any], says: str
) -> None:
    first = () if kind is manyhands.Peer else (inner(),)
    with pytest.raises(ConfigError, match=says) as caught:
        kind(*first, **named)
    assert "docs/how-to/from-hivemind.md" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "named", "says"),
    [
        (manyhands.Optimizer.step, {"grad_scaler": None}, r"manyhands.Optimizer.step .*write scaler.step\(optimizer\)"),
        (manyhands.ProcessGroupOptimizer.step, {"grad_scaler": None}, r"write scaler.step\(optimizer\)"),
        (manyhands.Averager.step, {"timeout": 30.0}, "write timeout_s= instead of timeout="),
        (
            manyhands.Averager.step,
            {"gather": {}, "wait": False},
            r"write peer.store\(\) .*; leave wait= out: call step",
        ),
        (manyhands.Averager.load_state_from_peers, {"timeout": 30.0}, "write timeout_s= instead of timeout="),
        (manyhands.Peer.store, {"key": "k", "expiration_time": 1.0}, "write ttl_s=60, .* instead of expiration_time="),
        (manyhands.Peer.get, {"key": "k", "latest": True}, "leave latest= out: the latest value is read anyway"),
    ],
)
def test_arguments_of_hivemind_calls_are_refused_with_what_to_write(
    method: Any, named: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        method(None, **named)
    assert "docs/how-to/from-hivemind.md" in str(caught.value)


def test_known_and_unknown_keywords_are_left_to_python() -> None:
    assert Model(3, client_mode=True).size == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        Model(3, colour=1)  # type: ignore[call-arg]


def test_a_misspelt_keyword_is_refused_with_the_similar_one() -> None:
    with pytest.raises(TypeError, match=r"keyword argument 'client_mod'; did you mean client_mode=\?"):
        Model(3, client_mod=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Optimizer .* 'target_batchsize'; did you mean target_batch_size=\?"):
        manyhands.Optimizer(inner(), target_batchsize=256)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"did you mean initial_peers=\?"):
        manyhands.Peer(initial_peer=[])  # type: ignore[call-arg]
    assert AnyModel(client_mod=True).named == {"client_mod": True}


def test_refused_hivemind_names_are_none_of_ours_and_all_documented() -> None:
    own = inspect.signature(manyhands.Optimizer.__init__).parameters.keys()
    assert not own & INSTEAD.keys()
    assert not {*dir(manyhands.Optimizer), *dir(manyhands.Peer)} & OF_OBJECTS.keys()
    assert not {*dir(manyhands)} & OF_PACKAGE.keys()
    text = PAGE.read_text()
    assert [name for name in (*INSTEAD, *OF_OBJECTS, *OF_PACKAGE) if name not in text] == []


@pytest.mark.parametrize(
    ("of", "name", "says"),
    [
        (manyhands.Peer, "get_visible_maddrs", "'Peer' object has .*; write addresses instead of get_visible_maddrs"),
        (manyhands.Averager, "shutdown", r"write close\(\), or a with block instead of shutdown"),
        (manyhands.Averager, "get_tensors", "leave get_tensors out: change your own tensors"),
        (manyhands.Optimizer, "local_epoch", "'Optimizer' object has .*; write global_step instead of local_epoch"),
        (manyhands.Optimizer, "load_state_from_peers", r"write manyhands.load_state_from_peers\(peer, run_id, into="),
        (manyhands.ProcessGroupOptimizer, "tracker", "write progress, or global_step instead of tracker"),
    ],
)
def test_attributes_of_hivemind_are_missing_and_the_error_says_what_to_write(of: Any, name: str, says: str) -> None:
    one = object.__new__(of)
    with pytest.raises(AttributeError, match=says) as caught:
        getattr(one, name)
    assert "docs/how-to/from-hivemind.md" in str(caught.value)
    assert not hasattr(one, name)
    assert getattr(one, name, None) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("DHT", r"write manyhands.Peer\(initial_peers=\[...\]\) instead of DHT"),
        ("get_dht_time", r"leave get_dht_time out: peer.store\(\) takes ttl_s=60"),
        ("GradScaler", "write torch.amp.GradScaler instead of GradScaler"),
        ("DecentralizedAverager", "write manyhands.Averager instead of DecentralizedAverager"),
    ],
)
def test_names_in_the_package_of_hivemind_are_missing_and_the_error_says_what_to_write(name: str, says: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'manyhands' has no attribute '{name}'; {says}"):
        getattr(manyhands, name)
    assert not hasattr(manyhands, name)


def test_other_missing_attributes_are_left_to_python() -> None:
    model = Model(3)
    for one in (model, object.__new__(manyhands.Optimizer)):
        with pytest.raises(AttributeError, match=r"object has no attribute 'colour'$"):
            one.colour  # noqa: B018
    with pytest.raises(AttributeError, match="'int' object has no attribute 'no_such_thing'"):
        _ = model.faulty
    assert inspect.getmembers(model, inspect.ismethod)
    for make_a_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="cannot be copied or pickled"):
            make_a_copy(model)


@pytest.mark.parametrize("peer", [None, object()])
def test_a_peer_argument_that_is_no_peer_is_refused_with_how_to_make_one(peer: Any) -> None:
    says = r"must be this machine's manyhands.Peer: peer=manyhands.Peer\(\) begins a swarm"
    with pytest.raises(ConfigError, match=says):
        manyhands.Optimizer(inner(), peer=peer, run_id="run", target_batch_size=8)
    with pytest.raises(ConfigError, match=says):
        manyhands.Averager([torch.zeros(1)], peer=peer, run_id="run")


@pytest.mark.parametrize(
    "named", [{"initial_peers": "127.0.0.1:1"}, {"listen": "127.0.0.1:1"}, {"announce": "127.0.0.1:1"}]
)
def test_one_address_in_place_of_a_list_is_refused(named: dict[str, Any]) -> None:
    says = r"'127.0.0.1:1' is one address where a list of them is needed; write \['127.0.0.1:1'\]"
    with pytest.raises(ConfigError, match=says):
        manyhands.Peer(**named)
    with pytest.raises(ConfigError, match=says):
        manyhands.Peer("127.0.0.1:1")
