"""Checkpoints of a run: model, optimizer and position on disk, for any training loop."""
