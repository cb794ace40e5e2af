"""The ranks that exchange: processes of torch.distributed, or virtual workers in one process."""
