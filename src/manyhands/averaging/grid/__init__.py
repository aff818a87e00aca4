"""The groups of a swarm that is larger than one group."""
