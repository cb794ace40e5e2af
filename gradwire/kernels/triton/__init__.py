"""The Triton versions of the ops, one file per op, and the parts that they share."""
