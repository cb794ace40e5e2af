"""Adapters from training loops to a State: DDP, FSDP2, plain loops, and three trainers.

All algorithms are in other folders.
"""
