"""The planner compared with the papers and with measured steps."""
