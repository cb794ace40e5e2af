"""The selection: README.md tells the algorithm, phase by phase."""
