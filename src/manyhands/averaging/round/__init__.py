"""One round in a formed group: exchanges of values, and a vote after each, until all members know one verdict."""
