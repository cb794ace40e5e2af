"""The integration tests under each supported torch, and a table of them (`make compat`)."""
