"""Faults on purpose: ranks killed, links cut, disks filled, and the outcome (`make faults`)."""
