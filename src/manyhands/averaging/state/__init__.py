"""The state that a newcomer gets from others: its bytes in chunks, and its download from many donors."""
