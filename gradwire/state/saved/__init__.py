"""Checkpoints of all ranks: writing, checking and reading their folders."""
