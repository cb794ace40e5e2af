"""The Triton versions, one file an op, and the parts that they share."""
