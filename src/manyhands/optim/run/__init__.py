"""One peer's view of the run, from the others' records, and its decisions and rounds in it."""
