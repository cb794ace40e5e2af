"""Many virtual workers in one process, fast: one batched model in place of P."""
