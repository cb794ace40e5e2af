"""The ranks: torch.distributed's, or virtual workers in one process."""
