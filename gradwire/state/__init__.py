"""One rank's state: its choices, its steps, its statistics, its checkpoints."""
