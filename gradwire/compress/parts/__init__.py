"""Methods in which each worker chooses in a part of its own."""
