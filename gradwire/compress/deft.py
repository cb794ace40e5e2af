"""DEFT: k shared out over the layers by their norms, and the layers over the workers."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire import kernels
from gradwire.compress.partition import between, share, turn
from gradwire.types import ALIGN, Memory, Scan, Sparse

ROUNDS = 8


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
    bounds, piece = _table(memory, u)
    sizes = bounds.diff() * ALIGN
    rows = pad(u, (0, -u.numel() % ALIGN)).view(-1, ALIGN)
    if memory.get("counts", u).numel() != sizes.numel():
        memory["counts"] = sizes.clone()
    mine = binned(memory["counts"], memory.ranks) == turn(memory, u.device)
    energy = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
    norms = torch.segment_reduce(energy, "sum", offsets=bounds, unsafe=True).sqrt()
    room = share(k, u.numel(), memory.ranks)
    wanted = torch.where(mine, portions(norms, sizes.clamp(max=room), k), 0)
    if scan is not None and scan.maxima is not None:
        maxima = scan.maxima.view(rows.shape[0], -1).amax(dim=1)
    else:
        maxima = rows.abs().amax(dim=1)
    return _largest(rows, maxima, piece, bounds, wanted, room, u.numel())


def deft_learns(memory: Memory, agreed: Sparse, k: int) -> None:
    """Notes how many entries of each piece were chosen."""
    bounds = (memory.fixed["bounds"] * ALIGN).clamp(max=agreed.size)
    memory["counts"].copy_(between(agreed, bounds))


def portions(norms: Tensor, sizes: Tensor, k: int) -> Tensor:
    """k in proportion to the norms, at least 1 and at most its size each; the rest moves on."""
    given = torch.zeros_like(norms)
    for _ in range(ROUNDS):
        weight = torch.where(given < sizes, norms, 0)
        # Nothing is open, or all that is open is zero: then nothing moves.
        per = torch.nan_to_num((k - given.sum()) / weight.sum(), 0, 0, 0)
        given = torch.minimum(given + per * weight, sizes.to(norms.dtype))
    return torch.minimum((given + 0.5).floor().clamp(min=1).long(), sizes)


def binned(costs: Tensor, ranks: int) -> Tensor:
    """The bin of each piece: the costliest first, there and back again."""
    place = torch.arange(costs.numel(), device=costs.device)
    there, column = place // ranks % 2 == 0, place % ranks
    order = costs.argsort(descending=True, stable=True)
    return torch.empty_like(place).scatter_(
        0, order, torch.where(there, column, ranks - 1 - column)
    )


def _largest(
    rows: Tensor,
    maxima: Tensor,
    piece: Tensor,
    bounds: Tensor,
    wanted: Tensor,
    room: int,
    size: int,
) -> Sparse:
    """The `wanted` largest of each piece, exactly, but `room` in all.

    They are among as many blocks of largest maximum, by the same order of ties.
    """
    chosen = _ranks(maxima, piece, bounds) < wanted[piece]
    blocks = kernels.topk(torch.where(chosen, maxima, 0), min(room, maxima.numel()))
    rest, owner = rows[blocks], piece[blocks]
    rest = torch.where(chosen[blocks, None], rest, 0).view(-1)
    owners = owner.repeat_interleave(ALIGN, output_size=rest.numel())
    firsts = torch.searchsorted(owner, torch.arange(bounds.numel(), device=owner.device)) * ALIGN
    winners = _ranks(rest.abs(), owners, firsts) < wanted[owners]
    nothing = torch.zeros((), device=rest.device)
    found, values, count = kernels.above(torch.where(winners, rest, 0), nothing, room)
    inside = found.clamp(max=rest.numel() - 1)
    where = blocks[inside // ALIGN] * ALIGN + inside % ALIGN
    return Sparse(torch.where(found < rest.numel(), where, size), values, count, size)


def _ranks(magnitude: Tensor, piece: Tensor, firsts: Tensor) -> Tensor:
    """The place of each entry in its piece by falling magnitude; ties go to the smaller index.

    piece: ascending. firsts: where each piece begins. The bits of a positive float rise as it does.
    """
    bits = magnitude.float().view(torch.int32).long()
    order = (piece * 2**32 - bits).sort(stable=True).indices
    place = torch.arange(order.numel(), device=order.device) - firsts[piece]
    return torch.empty_like(order).scatter_(0, order, place)


def _table(memory: Memory, u: Tensor) -> tuple[Tensor, Tensor]:
    """(bounds, piece): the first block of each piece and the end, and each block's piece."""
    if "bounds" not in memory.fixed:
        ends = [*memory.offsets[1:], u.numel()]
        bounds = [0]
        for start, end in zip(memory.offsets, ends, strict=True):
            first, last = start // ALIGN, -(-end // ALIGN)
            parts = memory.ranks if end - start > u.numel() / memory.ranks else 1
            parts = min(parts, last - first)
            bounds += [first + (last - first) * i // parts for i in range(1, parts + 1)]
        blocks = torch.arange(bounds[-1], device=u.device)
        memory.fixed["bounds"] = torch.tensor(bounds, device=u.device)
        memory.fixed["piece"] = torch.searchsorted(memory.fixed["bounds"], blocks, right=True) - 1
    return memory.fixed["bounds"], memory.fixed["piece"]
