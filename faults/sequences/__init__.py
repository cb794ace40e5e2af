"""Fuzzer of sequences: operations in random legal and illegal orders, checked after each one.

After each operation the law holds as seen from outside, and replicas are equal. Or there is one
clear error on every rank, and nothing has changed.
"""
