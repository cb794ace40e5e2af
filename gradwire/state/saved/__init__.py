"""Checkpoints: what is written, checked and read."""
