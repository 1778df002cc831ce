"""What a run of a model would use here, and why: as plain data, and as text."""
