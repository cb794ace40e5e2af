"""The selection of the largest entries; README.md tells the algorithm, phase by phase."""
