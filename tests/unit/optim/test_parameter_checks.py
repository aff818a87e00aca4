from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands
from manyhands.base.errors import ConfigError
from manyhands.optim.options import check_frozen, checked_parameters
from manyhands.optim.step.host_copy import HostCopy
from manyhands.optim.step.replica import Replica
from tests.trainers import LISTEN

Parameter = torch.nn.Parameter
GOOD = Parameter(torch.ones(2))


def frozen(values: torch.Tensor) -> Parameter:
    return Parameter(values, requires_grad=False)


def made_in_inference_mode(requires_grad: bool) -> Parameter:
    with torch.inference_mode():
        return Parameter(torch.ones(3), requires_grad=requires_grad)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "complex": (
        lambda: Parameter(torch.ones(3, dtype=torch.complex64)),
        "is torch.complex64; trained parameters can be",
    ),
    "float8": (lambda: Parameter(torch.ones(3).to(torch.float8_e4m3fn)), "is torch.float8_e4m3fn; trained parameters"),
    "sparse": (lambda: Parameter(torch.eye(3).to_sparse()), "is torch.sparse_coo; a dense one is needed"),
    "meta": (lambda: Parameter(torch.ones(3, device="meta")), "is on the meta device; give it memory"),
    "inference": (lambda: made_in_inference_mode(True), "was made in inference mode"),
    "expanded": (lambda: Parameter(torch.ones(1).expand(3)), "several values of layer.weight share memory"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "has no shape yet; run a batch"),
    "frozen complex": (
        lambda: frozen(torch.ones(3, dtype=torch.complex64)),
        "frozen parameters can be of .*leave it out",
    ),
    "frozen float8": (lambda: frozen(torch.ones(3).to(torch.float8_e4m3fn)), "frozen parameters can be of .*leave it"),
    "frozen sparse": (lambda: frozen(torch.eye(3).to_sparse()), "a dense one is needed"),
    "frozen meta": (lambda: frozen(torch.ones(3, device="meta")), "is on the meta device"),
    "frozen in inference": (lambda: made_in_inference_mode(False), "was made in inference mode"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_parameters_that_cannot_be_trained_or_sent_are_refused_by_name(kind: str) -> None:
    make, why = REFUSED[kind]
    optimizer = torch.optim.SGD([("layer.bias", GOOD), ("layer.weight", make())], lr=0.1)
    with pytest.raises(ConfigError, match=why) as error:
        checked_parameters(optimizer)
    assert "layer.weight" in str(error.value)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """Of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch's own, of single processes and deprecated names
def test_a_parameter_in_several_processes_is_refused(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    parameter = Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    with pytest.raises(ConfigError, match="parameter 0 is a DTensor; an ordinary tensor is needed"):
        checked_parameters(torch.optim.SGD([parameter], lr=0.1))


@pytest.mark.parametrize("offload", [False, True])
def test_a_complex_parameter_is_refused_when_the_optimizer_is_made(offload: bool) -> None:
    parameters = [GOOD, Parameter(torch.ones(2, dtype=torch.complex128))]
    with (
        manyhands.Peer(listen=LISTEN) as peer,
        pytest.raises(ConfigError, match=r"parameter 1 is torch\.complex128"),
    ):
        manyhands.Optimizer(
            lambda params: torch.optim.SGD(params, lr=0.1),
            params=parameters, peer=peer, run_id="complex", target_batch_size=8, offload=offload,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_given_twice_is_refused() -> None:
    optimizer = torch.optim.SGD([GOOD, Parameter(torch.ones(1)), GOOD], lr=0.1)
    with pytest.raises(ConfigError, match="parameter 2 is given to the optimizer twice"):
        checked_parameters(optimizer)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter of the optimizer requires grad"):
        checked_parameters(torch.optim.SGD([frozen(torch.ones(2))], lr=0.1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_views_tied_empty_and_half_precision_parameters_can_be_trained(dtype: torch.dtype) -> None:
    flat = torch.zeros(6, dtype=dtype)
    views = [Parameter(flat[:2]), Parameter(flat[2:].view(2, 2).t())]
    tied = torch.nn.Linear(2, 2, dtype=dtype)
    model = torch.nn.Sequential(tied, torch.nn.Linear(2, 2, dtype=dtype), tied)
    checked_parameters(torch.optim.SGD([*views, Parameter(torch.zeros(0, dtype=dtype)), *model.parameters()], lr=0.1))


FROZEN_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64)


@pytest.mark.parametrize("dtype", FROZEN_DTYPES)
@pytest.mark.parametrize("offload", [False, True])
def test_a_newcomer_gets_frozen_numbers_exactly(dtype: torch.dtype, offload: bool) -> None:
    large = torch.tensor([2**40 + 1]).to(dtype) if dtype == torch.int64 else torch.ones(1, dtype=dtype)
    ours = Replica(torch.optim.SGD([GOOD, frozen(large.clone())], lr=0.1), None, offload=offload)
    newcomer = Parameter(torch.zeros(2)), frozen(torch.zeros_like(large))
    theirs = Replica(torch.optim.SGD(newcomer, lr=0.1), None, offload=offload)
    checked_parameters(theirs.optimizer)
    theirs.restore(ours.capture())
    assert torch.equal(newcomer[1], large)
    assert theirs.capture().header.digest == ours.capture().header.digest


def test_specs_of_frozen_numbers_do_not_depend_on_offload() -> None:
    specs = []
    for offload in (False, True):
        replica = Replica(torch.optim.SGD([GOOD, frozen(torch.ones(1).long())], lr=0.1), None, offload=offload)
        specs.append(replica.capture().header.tensors)
    assert specs[0] == specs[1]


def test_parameters_that_share_memory_have_no_copies_on_the_host() -> None:
    """Each would get one of its own, and show the model what the other has not."""
    base = torch.ones(4)
    checked_parameters(torch.optim.SGD([Parameter(base), Parameter(base)], lr=0.1))
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight share memory"):
        HostCopy(torch.optim.SGD([("0.weight", Parameter(base)), ("1.weight", Parameter(base[1:]))], lr=0.1))
    HostCopy(torch.optim.SGD([Parameter(base[:2]), Parameter(base[2:])], lr=0.1))


def test_frozen_parameters_that_are_frozen_no_more_are_named() -> None:
    late, always = frozen(torch.ones(2)), frozen(torch.ones(2))
    optimizer = torch.optim.SGD([("head", GOOD), ("body", late), ("words", always)], lr=0.1)
    named = [(name, parameter) for name, parameter in checked_parameters(optimizer) if not parameter.requires_grad]
    check_frozen(named)
    late.requires_grad_(True)
    with pytest.raises(ConfigError, match="body was frozen when the Optimizer was made"):
        check_frozen(named)
    late.requires_grad_(False)
    check_frozen(named)
