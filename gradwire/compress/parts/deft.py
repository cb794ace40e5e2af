"""DEFT: k is divided over the layers by their norms, and the layers over the workers."""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.method import Method
from gradwire.compress.parts.partition import capacity_per_rank, count_between, next_part
from gradwire.kernels.largest import in_rows
from gradwire.types import ALIGN, Memory, Scan, Sparse

_ROUNDS = 8
"""The number of passes that move the surplus of full pieces to the others."""
_CACHED = 4096
"""The number of rows that stay in a CPU's cache as fp64."""


def deft(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """k divided over layers by norm, and layers over workers; k entries in all.

    Yoon and Oh (2023): a layer of more than d / P entries is cut into P pieces. A piece of norm n
    gets k n / sum(n) entries, at least 1 and at most all it has. Pieces are packed into P bins. In
    step t worker p takes the largest entries of each piece of bin (p + t) mod P. A message has room
    for twice an even share of k. No piece gets more, and the smallest entries are cut.
    Different from the released code, in which a leader packs and broadcasts, and every piece costs
    a host sync:
    - k is divided within a bundle, not within the model.
    - The surplus of full pieces goes to all other pieces at once, not to pieces of smaller norm.
    - Every rank packs alone, by the number of entries chosen in each piece in the last step, which
      all ranks know. Sorted by that number, pieces go to bins 0 .. P - 1, P - 1 .. 0 and so on. The
      paper puts the largest piece into the least-loaded bin, a loop that a device cannot run at
      once.
    - Bins therefore have equal shares of k, for which messages have room, instead of equal sorting
      times. The largest entry of each block of 64 rules out nearly everything before anything is
      sorted.
    """
    bounds = _bounds(memory, u)
    sizes = bounds.diff()
    rows = in_rows(u, ALIGN)
    if memory.get("counts", u).numel() != sizes.numel():
        memory["counts"] = sizes.clone()
    is_turn = assign_bins(memory["counts"], memory.ranks) == next_part(memory, u.device)
    energy, firsts = _norms(rows).square(), -(-bounds // ALIGN)
    norms = torch.segment_reduce(energy, "sum", offsets=firsts, unsafe=True).sqrt()
    room = capacity_per_rank(k, u.numel(), memory.ranks)
    wanted = torch.where(is_turn, allot_entries(norms, sizes.clamp(max=room), k), 0)
    if scan is not None and scan.maxima is not None:
        maxima = scan.maxima.view(rows.shape[0], -1).amax(dim=1)
    else:
        maxima = rows.abs().amax(dim=1)
    chosen = kernels.largest_in_pieces(u, bounds, wanted, room, maxima, ALIGN)
    return Sparse(*chosen, u.numel())


def deft_learns(memory: Memory, agreed: Sparse, k: int) -> None:
    """Note the number of entries that were chosen in each piece."""
    memory["counts"].copy_(count_between(agreed, memory.derived["bounds"]))


def allot_entries(norms: Tensor, sizes: Tensor, k: int) -> Tensor:
    """Return k in proportion to the norms, at least 1 and at most its size per piece.

    The surplus of full pieces moves on to the others.
    """
    allotted = torch.zeros_like(norms)
    for _ in range(_ROUNDS):
        weight = torch.where(allotted < sizes, norms, 0)
        # 0 / 0 and x / 0 mean that no piece with a norm is open: then nothing moves.
        rate = torch.nan_to_num((k - allotted.sum()) / weight.sum(), 0, 0, 0)
        allotted = torch.minimum(allotted + rate * weight, sizes.to(norms.dtype))
    return torch.minimum((allotted + 0.5).floor().clamp(min=1).long(), sizes)


def _norms(rows: Tensor) -> Tensor:
    """Return the norm of each row, in fp64.

    A CPU is six times faster with copies that stay in its cache.
    """
    if rows.device.type != "cpu":
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    result = torch.empty(rows.shape[0], dtype=torch.float64)
    scratch = torch.empty(min(_CACHED, rows.shape[0]), rows.shape[1], dtype=torch.float64)
    for part, norms in zip(rows.split(_CACHED), result.split(_CACHED), strict=True):
        torch.linalg.vector_norm(scratch[: len(part)].copy_(part), dim=1, out=norms)
    return result


def assign_bins(costs: Tensor, ranks: int) -> Tensor:
    """Return the bin of each piece: the costliest first, to bins 0 .. P - 1 and back again."""
    place = torch.arange(costs.numel(), dtype=torch.int64, device=costs.device)
    forward, column = place // ranks % 2 == 0, place % ranks
    order = costs.argsort(descending=True, stable=True)
    return torch.empty_like(place).scatter_(
        0, order, torch.where(forward, column, ranks - 1 - column)
    )


def _bounds(memory: Memory, u: Tensor) -> Tensor:
    """Return the first entry of each piece, and the end."""
    if "bounds" not in memory.derived:
        ends = [*memory.offsets[1:], u.numel()]
        bounds = [0]
        for start, end in zip(memory.offsets, ends, strict=True):
            blocks = -(-(end - start) // ALIGN)
            parts = min(memory.ranks if end - start > u.numel() / memory.ranks else 1, blocks)
            bounds += [start + blocks * i // parts * ALIGN for i in range(1, parts)] + [end]
        memory.derived["bounds"] = torch.tensor(bounds, dtype=torch.int64, device=u.device)
    return memory.derived["bounds"]


METHOD = Method(deft, exchange="union", capacity_per_rank=capacity_per_rank, learns=deft_learns)
