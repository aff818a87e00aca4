"""One global step: from a peer's gradients to the new parameters."""
