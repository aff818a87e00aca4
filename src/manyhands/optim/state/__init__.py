"""What a newcomer loads: the state of a run, how it travels, and how it is checked."""
