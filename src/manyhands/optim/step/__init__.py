"""One step from gradients to parameters."""
