"""The memory of one trainer of a small ALBERT, by what it has done, and what the compiled kernels would add.

    python benchmarks/trainer_memory.py [--json FILE]

PSS in MiB: memory that other processes share counts by its part, so it is higher where nobody else has PyTorch loaded.
"""

from __future__ import annotations

import psutil
from _command_line import Parser, json_path, run, write_json

VALUES = 2000  # of the vocabulary


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    rows = []

    def note(stage: str) -> None:
        rows.append({"stage": stage, "pss_mb": round(psutil.Process().memory_full_info().pss / 2**20)})
        print(f"{rows[-1]['pss_mb']:5} MiB  {stage}", flush=True)

    import torch

    torch.set_num_threads(1)
    note("PyTorch imported")
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=VALUES, embedding_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=512,
    )  # fmt: skip
    model = transformers.AlbertForPreTraining(config)
    words, order = torch.randint(0, VALUES, (8, 64)), torch.zeros(8, dtype=torch.long)
    adamw = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(input_ids=words, labels=words, sentence_order_label=order).loss.backward()
    adamw.step()
    note("transformers imported, model made, three batches and a step of AdamW")

    import manyhands
    from manyhands.averaging.codecs import kernels

    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
        note("Peer")
        manyhands.Optimizer(adamw, peer=peer, run_id="memory", target_batch_size=64, batch_size_per_step=8)
        note("Optimizer")
        kernels.prepare(kernels.MIN_NUMEL, "auto")
        note("the compiled kernels, as with a model of four million values or more")
    write_json(options.json, rows)


if __name__ == "__main__":
    run(main)
