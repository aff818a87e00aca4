"""A transformers Trainer in a run: python examples/transformers_trainer.py [ADDRESS OF ANY PEER ...]"""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import manyhands
from manyhands.training.transformers import CollaborativeCallback

model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=1, n_head=2))
texts = (torch.arange(1000)[:, None] + torch.arange(16)) % 100  # each token is the previous one plus 1
dataset = [{"input_ids": text, "labels": text} for text in texts]
arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=500, learning_rate=0.01, logging_steps=1, report_to=[], save_strategy="no"
)
trainer = Trainer(model, arguments, train_dataset=dataset)

with manyhands.Peer(initial_peers=sys.argv[1:]) as peer:
    print("others join with: python examples/transformers_trainer.py", *peer.addresses, flush=True)
    trainer.add_callback(CollaborativeCallback(trainer, peer=peer, run_id="trainer", target_batch_size=256))
    trainer.train()
