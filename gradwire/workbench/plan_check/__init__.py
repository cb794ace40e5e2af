"""Check the planner against a paper and against measured steps."""
