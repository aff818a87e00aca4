"""`manyhands.Optimizer` with a model on a GPU: over real sockets, peers in threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import manyhands
from manyhands.optim.accumulator import GradientAccumulator
from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.run.step_rounds import Averaged
from manyhands.optim.step.replica import Replica
from tests.trainers import AVERAGING, FAST, in_threads, peers

BATCH_SIZE = 4
NUM_STEPS = 5
WIDTH = 32

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
ADAMW: Make = partial(torch.optim.AdamW, lr=0.01)
SGD: Make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def new_model(device: str = "cuda", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 3))
    return model.to(device, dtype)


def batch_of(step: int, peer: int, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + peer)
    parameter = next(model.parameters())
    inputs, targets = torch.randn(BATCH_SIZE, 5, generator=generator), torch.randn(BATCH_SIZE, 3, generator=generator)
    return inputs.to(parameter), targets.to(parameter)


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1].float())


def alone(make: Make, num_peers: int) -> torch.nn.Module:
    """What one process makes of all batches."""
    model = new_model()
    optimizer = make(list(model.parameters()))
    for step in range(NUM_STEPS):
        batches = [batch_of(step, peer, model) for peer in range(num_peers)]
        loss_of(model, (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train_together(
    models: list[torch.nn.Module],
    make: Make,
    *,
    loop: Callable[[int, manyhands.Optimizer, torch.nn.Module], None] | None = None,
    check: Callable[[int, manyhands.Optimizer], None] = lambda number, optimizer: None,
    **options: Any,
) -> list[str]:
    """Each with a batch in each global step; returns the digests of their states."""
    digests = [""] * len(models)
    barrier = threading.Barrier(len(models), timeout=30)

    def train(number: int, peer: manyhands.Peer) -> None:
        model = models[number]
        optimizer = manyhands.Optimizer(
            make(list(model.parameters())), peer=peer, run_id="gpu", target_batch_size=BATCH_SIZE * len(models),
            batch_size_per_step=BATCH_SIZE, **{"averaging": AVERAGING, "progress": FAST} | options,
        )  # fmt: skip
        barrier.wait()
        (loop or plain_loop)(number, optimizer, model)
        optimizer.settle()
        barrier.wait()
        check(number, optimizer)
        counts = optimizer.statistics
        assert counts.samples_computed == counts.samples_used + counts.samples_dropped + optimizer.samples_accumulated
        digests[number] = optimizer.state_digest()
        barrier.wait()

    with peers(len(models)) as swarm:
        in_threads([partial(train, number, peer) for number, peer in enumerate(swarm)], timeout_s=90.0)
    return digests


def plain_loop(number: int, optimizer: manyhands.Optimizer, model: torch.nn.Module) -> None:
    for step in range(NUM_STEPS):
        loss_of(model, batch_of(step, number, model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_for_step(optimizer, step + 1)


def wait_for_step(optimizer: manyhands.Optimizer, global_step: int) -> None:
    deadline = time.monotonic() + 20.0
    while optimizer.global_step < global_step:
        if time.monotonic() > deadline:
            pytest.fail(f"step {global_step} was not reached: {optimizer.statistics}")
        optimizer.step(batch_size=0)
        time.sleep(0.005)


@pytest.mark.parametrize("make", [SGD, ADAMW, partial(torch.optim.AdamW, lr=0.01, fused=True),
                                  partial(torch.optim.AdamW, lr=0.01, capturable=True), manyhands.optim.Lamb],
                         ids=["SGD", "AdamW", "fused", "capturable", "Lamb"])  # fmt: skip
@pytest.mark.parametrize("offload", [False, True])
def test_steps_are_those_of_one_process_with_the_whole_batch(make: Make, offload: bool) -> None:
    if offload and getattr(make, "keywords", {}).get("capturable"):
        pytest.skip("the state on the host has no use for CUDA graphs")
    models = [new_model(), new_model()]
    digests = train_together(models, make, offload=offload)
    assert digests[0] == digests[1]
    for ours, theirs in zip(models[0].parameters(), alone(make, 2).parameters(), strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_offload_keeps_float32_on_the_host_for_parameters_of_half_precision(dtype: torch.dtype) -> None:
    models = [new_model(dtype=dtype), new_model(dtype=dtype)]

    def check(number: int, optimizer: manyhands.Optimizer) -> None:
        for group in optimizer.inner.param_groups:
            assert all(own.is_cpu and own.dtype == torch.float32 for own in group["params"])
        for statistics in optimizer.inner.state.values():
            assert all(value.is_cpu for value in statistics.values() if isinstance(value, torch.Tensor))
        shown = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert all(a is b for a, b in zip(shown, models[number].parameters(), strict=True))

    digests = train_together(models, ADAMW, offload=True, check=check)
    assert digests[0] == digests[1]
    for first, second, reference in zip(*[m.parameters() for m in models], alone(ADAMW, 2).parameters(), strict=True):
        assert first.is_cuda
        assert first.dtype == dtype
        assert torch.equal(first, second)
        torch.testing.assert_close(first.float(), reference, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("delay", ["optimizer", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peers_with_background_steps_end_with_equal_parameters(delay: str, dtype: torch.dtype) -> None:
    models = [new_model(dtype=dtype), new_model(dtype=dtype)]

    def loop(number: int, optimizer: manyhands.Optimizer, model: torch.nn.Module) -> None:
        deadline, batch = time.monotonic() + 40.0, 0
        while optimizer.global_step < NUM_STEPS:
            assert time.monotonic() < deadline, optimizer.statistics
            loss_of(model, batch_of(batch, number, model)).backward()
            optimizer.step()
            optimizer.zero_grad()
            batch += 1
            time.sleep(0.05)
        optimizer.settle()
        ends[number] = optimizer.global_step
        both_ended.wait()
        wait_for_step(optimizer, max(ends))

    ends, both_ended = [0, 0], threading.Barrier(2, timeout=30)
    digests = train_together(models, ADAMW, delay=delay, loop=loop)
    assert digests[0] == digests[1]
    for first, second in zip(*[model.parameters() for model in models], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("half_params", [False, True])
def test_peers_with_autocast_and_grad_scalers_stay_equal(half_params: bool) -> None:
    """Its first scales are too large for float16, so batches are dropped until it has come down."""
    dtype = torch.float16 if half_params else torch.float32
    models = [new_model(dtype=dtype), new_model(dtype=dtype)]
    dropped = [0, 0]

    def loop(number: int, optimizer: manyhands.Optimizer, model: torch.nn.Module) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
        step, deadline = 0, time.monotonic() + 40.0
        while optimizer.global_step < NUM_STEPS:
            assert time.monotonic() < deadline, (optimizer.statistics, scaler.get_scale())
            inputs, targets = batch_of(step, number, model)
            with torch.autocast("cuda", torch.float16):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
        dropped[number] = optimizer.statistics.samples_dropped

    digests = train_together(models, SGD, loop=loop, offload=half_params)
    assert digests[0] == digests[1]
    assert min(dropped) > 0, "no scale was too large"
    assert all(bool(parameter.isfinite().all()) for parameter in models[0].parameters())


def test_a_cuda_graph_replays_into_the_gradients_that_the_optimizer_reads() -> None:
    models = [new_model(), new_model()]
    capturing = threading.Lock()  # of all threads of a process one may capture at a time

    def loop(number: int, optimizer: manyhands.Optimizer, model: torch.nn.Module) -> None:
        inputs, targets = (tensor.clone() for tensor in batch_of(0, number, model))
        with capturing:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    model.zero_grad()
                    loss_of(model, (inputs, targets)).backward()
            torch.cuda.current_stream().wait_stream(stream)
            model.zero_grad()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss_of(model, (inputs, targets)).backward()
        for step in range(NUM_STEPS):
            new_inputs, new_targets = batch_of(step, number, model)
            inputs.copy_(new_inputs)
            targets.copy_(new_targets)
            graph.replay()
            optimizer.step()
            wait_for_step(optimizer, step + 1)  # no zero_grad: the graph writes over what is there

    digests = train_together(models, SGD, loop=loop)
    assert digests[0] == digests[1]
    for ours, theirs in zip(models[0].parameters(), alone(SGD, 2).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("donor", ["cuda", "cpu"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=["plain", "fused", "capturable"])
def test_a_newcomer_loads_the_state_onto_its_own_device(donor: str, options: dict[str, Any]) -> None:
    newcomers_device = "cpu" if donor == "cuda" else "cuda"
    make = partial(torch.optim.AdamW, lr=0.01)
    with peers(2) as (first, second):
        model = new_model(donor)
        own = options if donor == "cuda" else {}
        trained = manyhands.Optimizer(make(model.parameters(), **own), peer=first, run_id="state",
                                      target_batch_size=BATCH_SIZE, batch_size_per_step=BATCH_SIZE,
                                      averaging=AVERAGING, progress=FAST)  # fmt: skip
        for step in range(3):
            loss_of(model, batch_of(step, 0, model)).backward()
            trained.step()
            trained.zero_grad()
            wait_for_step(trained, step + 1)
        copy = new_model(newcomers_device)
        own = options if newcomers_device == "cuda" else {}
        newcomer = manyhands.Optimizer(make(copy.parameters(), **own), peer=second, run_id="state",
                                       target_batch_size=BATCH_SIZE, batch_size_per_step=BATCH_SIZE,
                                       averaging=AVERAGING, progress=FAST)  # fmt: skip
        assert newcomer.global_step == 3
        assert newcomer.state_digest() == trained.state_digest()
        for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
            assert ours.device.type == newcomers_device
            assert torch.equal(ours.cpu(), theirs.cpu())
        loss_of(copy, batch_of(9, 1, copy)).backward()
        newcomer.inner.step()  # its statistics are where this optimizer needs them
        assert all(bool(parameter.isfinite().all()) for parameter in copy.parameters())


def test_a_gpu_and_a_cpu_make_the_same_steps() -> None:
    models = [new_model("cuda"), new_model("cpu")]
    train_together(models, ADAMW)
    for on_gpu, on_cpu, reference in zip(
        models[0].parameters(), models[1].parameters(), alone(ADAMW, 2).parameters(), strict=True
    ):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(on_gpu, reference, rtol=1e-4, atol=1e-5)


def test_gradients_of_the_callers_stream_are_waited_for() -> None:
    models = [new_model(), new_model()]

    def loop(number: int, optimizer: manyhands.Optimizer, model: torch.nn.Module) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        big = torch.randn(4096, 4096, device="cuda")
        with torch.cuda.stream(stream):
            for step in range(NUM_STEPS):
                for _ in range(30):  # keeps the stream busy long after backward() has returned
                    big = (big @ big).clamp_(-1, 1)
                inputs, targets = batch_of(step, number, model)
                loss_of(model, (inputs + big[0, :5] * 0, targets)).backward()
                optimizer.step()
                optimizer.zero_grad()
                wait_for_step(optimizer, step + 1)
            stream.synchronize()

    digests = train_together(models, SGD, loop=loop)
    assert digests[0] == digests[1]
    for ours, theirs in zip(models[0].parameters(), alone(SGD, 2).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)


def test_a_failed_step_leaves_its_gradients_to_the_next() -> None:
    model = new_model()
    accumulator = GradientAccumulator(list(model.parameters()), ExtraTensors())

    def add(step: int) -> None:
        model.zero_grad()
        loss_of(model, batch_of(step, 0, model)).backward()
        accumulator.add(BATCH_SIZE)

    add(0)
    failed = accumulator.freeze()
    assert failed.mean_N.is_cpu
    add(1)
    accumulator.take_back(failed)
    both = accumulator.freeze()
    assert both.samples == 2 * BATCH_SIZE
    batches = [batch_of(step, 0, model) for step in range(2)]
    model.zero_grad()
    loss_of(model, (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))).backward()
    expected_N = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).cpu()
    torch.testing.assert_close(both.mean_N[: expected_N.numel()], expected_N, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offload", [False, True])
def test_a_model_moved_to_the_gpu_after_its_optimizer_is_made_trains_as_in_one_process(offload: bool) -> None:
    models = [new_model("cpu"), new_model("cpu")]

    def loop(number: int, optimizer: manyhands.Optimizer, model: torch.nn.Module) -> None:
        model.cuda()
        plain_loop(number, optimizer, model)
        buffer = optimizer._samples._accumulator._mean  # noqa: SLF001 (where the sum is only costs time)
        assert buffer is not None
        assert buffer.flat_N.is_cuda, "each batch would be copied to the host"

    digests = train_together(models, ADAMW, loop=loop, offload=offload)
    assert digests[0] == digests[1]
    for ours, theirs in zip(models[0].parameters(), alone(ADAMW, 2).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["SGD", "AdamW"])
def test_statistics_of_a_loaded_state_go_where_the_model_goes(make: Make) -> None:
    model, reference = new_model("cpu"), new_model("cpu")
    replicas = [Replica(make(list(one.parameters())), None) for one in (model, reference)]
    generator, numel = torch.Generator().manual_seed(3), sum(one.numel() for one in model.parameters())
    for device in ("cpu", "cuda", "cuda", "cpu"):
        model.to(device)
        averaged_N = torch.cat([torch.randn(numel, generator=generator), torch.ones(4)])
        for replica in replicas:
            assert not replica.advance(averaged_N.clone(), Averaged(None, b"next", 1))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_of_a_model_that_moves_within_a_step_are_all_added_up() -> None:
    model = new_model("cpu")
    accumulator = GradientAccumulator(list(model.parameters()), ExtraTensors())
    gradients = []
    for step, device in enumerate(["cpu", "cuda", "cuda", "cpu", "cuda"]):
        model.to(device)
        model.zero_grad()
        loss_of(model, batch_of(step, 0, model)).backward()
        accumulator.add(BATCH_SIZE, at_step=step)
        gradients.append(torch.cat([p.grad.reshape(-1).cpu() for p in model.parameters() if p.grad is not None]))
        if step == 2:
            failed = accumulator.freeze()
    accumulator.take_back(failed)
    both = accumulator.freeze()
    assert both.samples == 5 * BATCH_SIZE
    expected_N = torch.stack(gradients).mean(0)
    torch.testing.assert_close(both.mean_N[: expected_N.numel()], expected_N, rtol=1e-5, atol=1e-6)


def test_accelerate_moves_the_model_and_takes_the_optimizer() -> None:
    with peers(1) as (peer,):
        model = new_model("cpu")
        collaborative = manyhands.Optimizer(ADAMW(list(model.parameters())), peer=peer, run_id="accelerate",
                                            target_batch_size=BATCH_SIZE, batch_size_per_step=BATCH_SIZE,
                                            averaging=AVERAGING, progress=FAST)  # fmt: skip
        accelerator = Accelerator(mixed_precision="bf16")
        prepared, optimizer = accelerator.prepare(model, collaborative)
        for step in range(3):
            inputs, targets = batch_of(step, 0, prepared)
            accelerator.backward(torch.nn.functional.mse_loss(prepared(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            wait_for_step(collaborative, step + 1)
        assert all(parameter.is_cuda and bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_model_split_over_gpu_and_cpu_trains_as_in_one_process() -> None:
    def split_model() -> torch.nn.Module:
        model = new_model("cpu")
        model[0].cuda()  # type: ignore[index]
        return model

    def split_loss(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = model[1](model[0](batch[0].cuda())).cpu()
        return torch.nn.functional.mse_loss(model[2](hidden), batch[1].cpu())

    def loop(number: int, optimizer: manyhands.Optimizer, model: torch.nn.Module) -> None:
        for step in range(NUM_STEPS):
            split_loss(model, batch_of(step, number, model)).backward()
            optimizer.step()
            optimizer.zero_grad()
            wait_for_step(optimizer, step + 1)

    models = [split_model(), split_model()]
    digests = train_together(models, ADAMW, loop=loop)
    assert digests[0] == digests[1]
    for ours, theirs in zip(models[0].parameters(), alone(ADAMW, 2).parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-5)
