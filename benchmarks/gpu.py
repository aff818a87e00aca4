"""Cost of the collaborative optimizer and the averager on a GPU, compared with plain torch.

    python benchmarks/gpu.py [--batch-sizes 8,32,128] [--batches 30] [--mb 64,1024] [--json FILE]

A BERT of 183 million parameters (hidden size 1024, 12 layers, samples of 256 tokens, autocast in bfloat16) runs forward
and backward with plain torch and with `manyhands.Optimizer`, batch by batch in turns. Medians:

  plain_ms, added_ms  a batch with plain torch, and the time that `step()` adds when no global step is due
  read_ms, write_ms   copying the values of 200 tensors to the host, where `manyhands.Averager` has its rounds, and the
                      means back
  advance_ms          the AdamW update from an averaged gradient on the host, as in the Optimizer: including the copy of
                      the gradient to the GPU, its norm, and saving the previous parameters on the host
  peak_extra_x_params peak memory of the GPU for the update, in multiples of the parameters

If torch finds no NVIDIA GPU, it prints so and no figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _command_line import Parser, json_path, positive_int, progress_of, run, write_json

import manyhands
from manyhands.averaging.tensor_list import TensorList
from manyhands.optim.run.step_rounds import Averaged
from manyhands.optim.step.replica import Replica

Row = dict[str, Any]

NEVER = 10**9
VOCABULARY = 30_000
NUM_TOKENS = 256
NUM_TENSORS = 200
WARM_UP = 3
REPEATS = 7


def milliseconds(work: Callable[[], object]) -> float:
    """Milliseconds until the GPU has finished ``work``."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def median_ms(work: Callable[[], object]) -> float:
    work()
    return round(statistics.median(milliseconds(work) for _ in range(REPEATS)), 2)


def bert() -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, intermediate_size=4096,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: torch.nn.Module = transformers.BertForMaskedLM(config)
    return model.cuda()


def local_steps(peer: manyhands.Peer, batch_size: int, num_batches: int) -> Row:
    """Compare batches with and without the optimizer, in turns."""
    ids = torch.randint(0, VOCABULARY, (batch_size, NUM_TOKENS), device="cuda")
    plain_model, our_model = bert(), bert()
    optimizer = manyhands.Optimizer(
        torch.optim.AdamW(our_model.parameters()), peer=peer, run_id=f"batches-{batch_size}", target_batch_size=NEVER,
        batch_size_per_step=batch_size,
    )  # fmt: skip

    def compute(model: torch.nn.Module) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    def plain() -> None:
        compute(plain_model)
        plain_model.zero_grad()

    def ours() -> None:
        compute(our_model)
        optimizer.step()
        optimizer.zero_grad()

    times = [(milliseconds(plain), milliseconds(ours)) for _ in range(WARM_UP + num_batches)][WARM_UP:]
    optimizer.close()
    plain_ms = statistics.median(one for one, _ in times)
    added_ms = statistics.median(other for _, other in times) - plain_ms
    return {"batch_size": batch_size, "plain_ms": round(plain_ms, 2), "added_ms": round(added_ms, 2)}


def copies(mb: int) -> Row:
    """Measure copies of vectors and parameters of this size."""
    numel = mb * 250_000 // NUM_TENSORS
    tensors = TensorList([torch.randn(numel, device="cuda") for _ in range(NUM_TENSORS)])
    flat_N = tensors.values()
    row = {"mb": mb, "read_ms": median_ms(tensors.values), "write_ms": median_ms(lambda: tensors.assign(flat_N))}
    parameters = [torch.nn.Parameter(torch.randn(numel, device="cuda")) for _ in range(NUM_TENSORS)]
    replica = Replica(torch.optim.AdamW(parameters), None, max_grad_norm=1.0)
    averaged_N = torch.full((tensors.numel + NUM_TENSORS,), 1e-3)

    def advance() -> None:
        replica.advance(averaged_N, Averaged(None, b"next", 1))

    advance()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    row["advance_ms"] = median_ms(advance)
    row["peak_extra_x_params"] = round((torch.cuda.max_memory_allocated() - before) / (mb * 1e6), 2)
    return row


def sizes(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    try:
        return [positive_int(part.strip()) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; numbers separated by commas are needed") from error


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--batch-sizes", type=sizes, default=[8, 32, 128])
    parser.add_argument("--batches", type=positive_int, default=30, help="of each kind and size")
    parser.add_argument("--mb", type=sizes, default=[64, 1024], help="sizes of vectors")
    parser.add_argument("--json", type=json_path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch finds no NVIDIA GPU here", file=sys.stderr)
        write_json(arguments.json, [])
        return
    print(torch.cuda.get_device_name())
    rows = []
    with progress_of(len(arguments.batch_sizes) + len(arguments.mb)) as steps:
        with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
            for batch_size in arguments.batch_sizes:
                steps.begin(f"batches of {batch_size}")
                rows.append(local_steps(peer, batch_size, arguments.batches))
        for mb in arguments.mb:
            steps.begin(f"copies of {mb} MB")
            rows.append(copies(mb))
    for row in rows:
        print(json.dumps(row))
    write_json(arguments.json, rows)


if __name__ == "__main__":
    run(main)
