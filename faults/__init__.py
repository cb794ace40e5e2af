"""Faults on purpose: ranks killed, links cut, disks filled, and what came of it (`make faults`)."""
