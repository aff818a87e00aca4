"""Data of the ALBERT recipe: text to samples, prepared files, and fetching them from mirrors."""
