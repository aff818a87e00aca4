"""One verdict for all members of a round, and what they do when some are lost."""
