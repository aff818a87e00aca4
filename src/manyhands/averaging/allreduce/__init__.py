"""Values in, mean out: the butterfly all-reduce of one group."""
