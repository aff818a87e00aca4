"""Finds the peers that average together in a round."""
