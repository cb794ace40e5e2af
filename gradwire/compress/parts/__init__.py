"""Methods in which each worker chooses entries in a part of u."""
