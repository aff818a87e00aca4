"""The state of a run that a newcomer loads: its content, its transfer and its checks."""
