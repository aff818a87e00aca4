"""What this peer knows of the run, and how it takes part."""
