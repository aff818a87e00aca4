"""Commit by vote: all members of a round reach one verdict, also after some are lost."""
