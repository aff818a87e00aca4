"""A state that peers hand to each other: its bytes in chunks, its transfer from many donors."""
