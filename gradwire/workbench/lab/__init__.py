"""A slow network on one machine, and what is measured in it."""
