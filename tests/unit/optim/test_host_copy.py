from __future__ import annotations

import copy

import pytest
import torch

from manyhands.optim.run.step_rounds import Averaged
from manyhands.optim.state.tree import tensors_in
from manyhands.optim.step.host_copy import HostCopy
from manyhands.optim.step.replica import Replica
from manyhands.optim.wrapping import Wrapping


def new_parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype)), torch.nn.Parameter(torch.ones(2), requires_grad=False)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_small_updates_add_up_on_the_host(dtype: torch.dtype) -> None:
    """In half precision each of them would be lost."""
    parameters = new_parameters(dtype)
    replica = Replica(torch.optim.SGD(parameters, lr=1.0), None, offload=True)
    for _ in range(100):
        averaged_N = torch.cat([torch.full((3,), 1e-4), torch.ones(1)])
        assert not replica.advance(averaged_N, Averaged(None, b"next", 1))
    assert torch.equal(parameters[0].detach(), torch.ones(3, dtype=dtype)), "the model is shown nothing yet"
    replica.copy_to_model()
    torch.testing.assert_close(parameters[0].detach(), torch.full((3,), 0.99, dtype=dtype), rtol=5e-3, atol=0)
    (own, frozen) = replica.optimizer.param_groups[0]["params"]
    assert own.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(own.detach().float(), torch.full((3,), 0.99), rtol=1e-5, atol=0)
    assert not frozen.requires_grad
    assert replica.position.step == 100


def test_a_peer_that_leaves_during_a_backward_pass_does_not_break_it() -> None:
    """Another thread may close the optimizer, or the peer, at any moment."""
    parameters = new_parameters(torch.float32)
    replica = Replica(torch.optim.SGD(parameters, lr=1.0), None, offload=True)
    loss = (parameters[0] ** 2).sum()
    replica.release()
    loss.backward()
    assert parameters[0].grad is not None


def test_a_step_made_in_the_background_is_in_the_model_once_the_peer_has_left() -> None:
    parameters = new_parameters(torch.float32)
    replica = Replica(torch.optim.SGD(parameters, lr=1.0), None, offload=True)
    assert not replica.advance(torch.tensor([0.5, 0.5, 0.5, 1.0]), Averaged(None, b"next", 1))
    replica.release()
    assert torch.equal(parameters[0].detach(), torch.full((3,), 0.5))


def test_optimizer_statistics_move_to_the_host_copy() -> None:
    parameters = new_parameters(torch.bfloat16)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    parameters[0].grad = torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    before = optimizer.state[parameters[0]]["exp_avg"].clone()
    copy = HostCopy(optimizer)
    own = optimizer.param_groups[0]["params"][0]
    assert set(optimizer.state) == {own}
    assert torch.equal(optimizer.state[own]["exp_avg"], before.float())
    assert copy.shown_groups[0]["params"][0] is parameters[0]


def test_options_of_the_optimizer_are_shown_when_its_parameters_are() -> None:
    optimizer = torch.optim.SGD(new_parameters(torch.float32), lr=torch.tensor(0.1))
    copy = HostCopy(optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert copy.shown_groups[0]["lr"] == pytest.approx(0.1), "an update in the background shows nothing"
    copy.copy_to_model()
    assert copy.shown_groups[0]["lr"] == copy.shown_options[0]["lr"] == 0.25


def test_a_checkpoint_of_the_model_is_taken_over_without_losing_precision() -> None:
    parameters = new_parameters(torch.bfloat16)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    copy = HostCopy(optimizer)
    own = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        own.fill_(1 / 3)
    copy.copy_to_model()
    copy.take_over()
    assert own[0].item() == pytest.approx(1 / 3, abs=1e-7), "the model has the same, with fewer bits"
    with torch.no_grad():
        parameters[0].fill_(2.0)
    copy.take_over()
    assert own.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("has_failed", [False, True])
def test_statistics_of_any_form_are_given_back(has_failed: bool) -> None:
    """Some optimizers keep a tensor or a list for a parameter, and others something for all of them under a text."""
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.state[parameters[0]] = torch.ones(3, dtype=torch.bfloat16)  # type: ignore[assignment]
    optimizer.state[parameters[1]] = [torch.ones(3, dtype=torch.bfloat16), 7]  # type: ignore[assignment]
    optimizer.state[parameters[2]] = {"step": torch.tensor(1.0), "sums": [torch.ones(3, dtype=torch.bfloat16)]}
    optimizer.state["all"] = {"norms": torch.ones(2)}  # type: ignore[index]
    wrapping = Wrapping(optimizer, [(f"{number}", one) for number, one in enumerate(parameters)], "run", None)
    before = copy.deepcopy(optimizer.state_dict())
    host_copy = HostCopy(optimizer)
    assert {value.dtype for value in tensors_in(dict(optimizer.state))} == {torch.float32}
    if has_failed:
        wrapping.undo()
    else:
        host_copy.remove()
        wrapping.end()
    assert set(optimizer.state) == {*parameters, "all"}
    assert repr(optimizer.state_dict()) == repr(before)


def test_statistics_of_all_parameters_follow_the_model_to_its_device() -> None:
    """As the others do; a device without values stands for a GPU."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state["all"] = {"norms": torch.ones(2), "count": torch.tensor(1.0)}  # type: ignore[index]
    host_copy = HostCopy(optimizer)
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.ones(3, device="meta")))
    host_copy.remove()
    assert {name: value.device.type for name, value in optimizer.state["all"].items()} == {  # type: ignore[index]
        "norms": "meta",
        "count": "cpu",
    }
