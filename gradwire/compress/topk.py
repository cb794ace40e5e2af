"""Exact top-k: the k entries of largest magnitude."""

from torch import Tensor

from gradwire import kernels
from gradwire.compress.method import Method
from gradwire.kernels.dispatch import constant
from gradwire.types import Memory, Scan, Sparse


def topk(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """The k largest |u|, exactly; ties go to the smaller index.

    Top_k of Aji and Heafield (2017) and Stich et al. (2018). The error ||u - C(u)||^2 is the
    smallest that k entries allow.
    """
    known = () if scan is None else (scan.maxima, scan.block, scan.edge)
    indices, values = kernels.select(u, k, *known)
    return Sparse(indices, values, constant(k, u.device), u.numel())


METHOD = Method(topk, maxima16=True)
