"""DEFT: k shared out over the layers by their norms, and the layers over the workers."""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.parts.partition import between, capacity_per_rank, turn
from gradwire.kernels.largest import in_rows
from gradwire.types import ALIGN, Memory, Scan, Sparse

ROUNDS = 8
CACHED = 4096


def deft(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """k shared out over layers by norm, layers over workers; k in all.

    Yoon and Oh (2023): a layer of more than d / P entries is cut into P pieces; a piece of norm n
    gets k n / sum(n) entries, at least 1 and at most all it has; pieces are packed into P bins, and
    in step t worker p takes from each piece of bin (p + t) mod P its largest entries. A message has
    room for twice an even share of k; no piece gets more, and what is cut is the smallest.
    Different from the released code, in which a leader packs and broadcasts, and every piece costs
    a host sync:
    - k is shared out within a bundle, not within the model;
    - what full pieces leave over goes to all others at once, not to those of smaller norm;
    - every rank packs for itself, by what was chosen in each piece in the last step, which all
      ranks know: sorted by that, pieces go to bins 0 .. P - 1, P - 1 .. 0 and so on. The paper's
      largest-first to the least-loaded bin is a loop that a device cannot run at once;
    - so bins have equal shares of k, for which messages have room, not equal sorting times: the
      largest of each block of 64 rule out nearly everything before anything is sorted.
    """
    bounds = _bounds(memory, u)
    sizes = bounds.diff()
    rows = in_rows(u, ALIGN)
    if memory.get("counts", u).numel() != sizes.numel():
        memory["counts"] = sizes.clone()
    mine = binned(memory["counts"], memory.ranks) == turn(memory, u.device)
    energy, firsts = _norms(rows).square(), -(-bounds // ALIGN)
    norms = torch.segment_reduce(energy, "sum", offsets=firsts, unsafe=True).sqrt()
    room = capacity_per_rank(k, u.numel(), memory.ranks)
    wanted = torch.where(mine, portions(norms, sizes.clamp(max=room), k), 0)
    if scan is not None and scan.maxima is not None:
        maxima = scan.maxima.view(rows.shape[0], -1).amax(dim=1)
    else:
        maxima = rows.abs().amax(dim=1)
    found = kernels.largest_in_pieces(u, bounds, wanted, room, maxima, ALIGN)
    return Sparse(*found, u.numel())


def deft_learns(memory: Memory, agreed: Sparse, k: int) -> None:
    """Notes how many entries of each piece were chosen."""
    memory["counts"].copy_(between(agreed, memory.fixed["bounds"]))


def portions(norms: Tensor, sizes: Tensor, k: int) -> Tensor:
    """k in proportion to the norms, at least 1 and at most its size each; the rest moves on."""
    given = torch.zeros_like(norms)
    for _ in range(ROUNDS):
        weight = torch.where(given < sizes, norms, 0)
        # Nothing is open, or all that is open is zero: then nothing moves.
        per = torch.nan_to_num((k - given.sum()) / weight.sum(), 0, 0, 0)
        given = torch.minimum(given + per * weight, sizes.to(norms.dtype))
    return torch.minimum((given + 0.5).floor().clamp(min=1).long(), sizes)


def _norms(rows: Tensor) -> Tensor:
    """Of each row, in fp64. A CPU gets there six times faster by copies that stay in its cache."""
    if rows.device.type != "cpu":
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    out = torch.empty(rows.shape[0], dtype=torch.float64)
    scratch = torch.empty(min(CACHED, rows.shape[0]), rows.shape[1], dtype=torch.float64)
    for part, norms in zip(rows.split(CACHED), out.split(CACHED), strict=True):
        torch.linalg.vector_norm(scratch[: len(part)].copy_(part), dim=1, out=norms)
    return out


def binned(costs: Tensor, ranks: int) -> Tensor:
    """The bin of each piece: the costliest first, there and back again."""
    place = torch.arange(costs.numel(), dtype=torch.int64, device=costs.device)
    there, column = place // ranks % 2 == 0, place % ranks
    order = costs.argsort(descending=True, stable=True)
    return torch.empty_like(place).scatter_(
        0, order, torch.where(there, column, ranks - 1 - column)
    )


def _bounds(memory: Memory, u: Tensor) -> Tensor:
    """The first entry of each piece, and the end."""
    if "bounds" not in memory.fixed:
        ends = [*memory.offsets[1:], u.numel()]
        bounds = [0]
        for start, end in zip(memory.offsets, ends, strict=True):
            blocks = -(-(end - start) // ALIGN)
            parts = min(memory.ranks if end - start > u.numel() / memory.ranks else 1, blocks)
            bounds += [start + blocks * i // parts * ALIGN for i in range(1, parts)] + [end]
        memory.fixed["bounds"] = torch.tensor(bounds, dtype=torch.int64, device=u.device)
    return memory.fixed["bounds"]
