"""Choose entries of a vector: the k largest, or those beyond a threshold.

On the CPU block maxima rule out nearly everything before anything is compared exactly. The k-th
largest block maximum t is never above the k-th largest magnitude, because k blocks hold an entry of
at least t. A block whose maximum is below t therefore holds no winner. The rest is little, and
numpy handles it in one thread: torch's threads wait for each other where cores are busy.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.dispatch import versions
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.scan import STRETCH


def topk(u: Tensor, k: int, maxima: Tensor | None = None, block: int = 0) -> Tensor:
    """int32 indices, ascending, of the k largest |u|; ties go to the smaller index.

    u: flat and finite. maxima: max |u| of every `block` consecutive entries, when a scan left
    them; computed here otherwise.
    """
    return select(u, k, maxima, block)[0]


def select(
    u: Tensor,
    k: int,
    maxima: Tensor | None = None,
    block: int = 0,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor]:
    """The indices of `topk`, and the entries of u there.

    last_selection (CUDA): is told where the winners end.
    """
    if last_selection is None:
        return _select_on(u.device)(u, k, maxima, block)
    return _select_on(u.device)(u, k, maxima, block, last_selection)


def _with_values(version: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def both(u: Tensor, k: int, maxima: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
        indices = version(u, k, maxima, block)
        return indices, u[indices]

    return both


def block_size(size: int, k: int, device: torch.device = torch.device("cpu")) -> int:
    """Entries a block for choosing k of `size`; 0 where blocks cannot rule out enough to pay."""
    if device.type == "cuda":
        if k * 2000 <= size:
            return 64
        if k * 250 <= size:
            return 32
        return 16 if k * 48 <= size else 0
    if k * 128 <= size:
        return 64
    return 32 if k * 48 <= size else 0


def quantile(
    u: Tensor, scale: float, k: int, maxima: Tensor, block: int, last_selection: LastSelection
) -> tuple[Tensor, Tensor, Tensor]:
    """What `above` finds for the threshold of `Rule.NORMAL`, which takes no launch of its own.

    CUDA only, where `last_selection.has_counts`. The mean square is that of the entries the scan
    counted; the threshold is held between two magnitudes that k and 1.25 k blocks surely reach.
    """
    from gradwire.kernels.triton.select.entry import quantile_triton

    return quantile_triton(u, scale, k, maxima, block, last_selection)


def above(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, block: int = 0,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """int32 indices, values and count (0-d int32) of the entries with |u| > threshold.

    Ascending, padded to `capacity` with (size, 0). Where more entries pass, the `capacity` largest
    are taken, ties to the smaller index: a bad threshold cannot flood the wire.
    u: flat and finite. threshold: 0-d fp32 on u's device; NaN passes nothing. maxima: max |u| of
    every `block` consecutive entries, when a scan left them: a block whose maximum does not pass is
    not read. last_selection (CUDA): is told where the winners end.
    """
    if last_selection is None:
        return _above_on(u.device)(u, threshold, capacity, maxima, block)
    return _above_on(u.device)(u, threshold, capacity, maxima, block, last_selection)


def topk_torch(u: Tensor, k: int, maxima: Tensor | None = None, block: int = 0) -> Tensor:
    """See `topk`. The k-th magnitude, then everything above it and the first ties."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=u.device)
    magnitude = u.abs()
    bound = torch.topk(magnitude, k, sorted=False).values.amin()
    above = magnitude > bound
    tied = magnitude == bound
    chosen = above | (tied & (tied.cumsum(0) <= k - above.sum()))
    # One more place than k takes the writes of everything that was not chosen.
    place = torch.where(chosen, chosen.cumsum(0) - 1, k)
    out = torch.empty(k + 1, dtype=torch.int32, device=u.device)
    everyone = torch.arange(u.numel(), dtype=torch.int32, device=u.device)
    return out.scatter_(0, place, everyone)[:k]


def above_torch(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, block: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """See `above`. The largest, with what does not pass as zeros, which are left out then."""
    size, room = u.numel(), min(capacity, u.numel())
    magnitude = u.abs().to(torch.promote_types(u.dtype, torch.float32))
    passes = magnitude > threshold
    largest = topk_torch(torch.where(passes, magnitude, 0), room)
    indices = torch.where(passes[largest], largest, size).sort().values
    indices = pad(indices, (0, capacity - room), value=size)
    real = indices < size
    values = torch.where(real, u[indices.clamp(max=size - 1)], 0)
    return indices, values, real.sum(dtype=torch.int32)


def topk_cpu(u: Tensor, k: int, maxima: Tensor | None = None, block: int = 0) -> Tensor:
    """See `topk`."""
    from gradwire.kernels.select import block_size

    if k == 0:
        return torch.empty(0, dtype=torch.int32)
    if maxima is None:
        block = block_size(u.numel(), k)
        maxima = block_maxima(u, block) if block else None
    entries = array(u)
    if maxima is None or maxima.numel() <= k:
        return exact(np.arange(entries.size), np.abs(entries), k)
    largest = array(maxima)
    bound = kth_largest(largest, k)
    where, magnitude = candidates(entries, np.flatnonzero(largest >= bound), block, bound)
    return exact(where, magnitude, k)


def array(x: Tensor) -> np.ndarray:
    """The same memory; a copy for bf16, which numpy does not know."""
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


def candidates(
    u: np.ndarray,
    blocks: np.ndarray,
    block: int,
    bound: float | np.floating,
    passes: np.ufunc = np.greater_equal,
) -> tuple[np.ndarray, np.ndarray]:
    """Where the entries that pass `bound` are in the named blocks, ascending, and their size."""
    rows = u.size // block
    whole = blocks[blocks < rows]
    magnitude = np.abs(u[: rows * block].reshape(rows, block)[whole]).reshape(-1)
    near = np.flatnonzero(passes(magnitude, bound))
    where = whole[near // block] * block + near % block
    magnitude = magnitude[near]
    if whole.size < blocks.size:
        tail = np.abs(u[rows * block :])
        last = np.flatnonzero(passes(tail, bound))
        where = np.concatenate([where, last + rows * block])
        magnitude = np.concatenate([magnitude, tail[last]])
    return where, magnitude


def block_maxima(u: Tensor, block: int) -> Tensor:
    """max |u| of every `block` consecutive entries; the last block may be shorter."""
    out = torch.empty(-(-u.numel() // block), dtype=u.dtype)
    step = STRETCH // block * block
    scratch = torch.empty(min(step, u.numel()), dtype=u.dtype)
    for start in range(0, u.numel(), step):
        part = torch.abs(u[start : start + step], out=scratch[: u[start : start + step].numel()])
        rows, first = part.numel() // block, start // block
        if rows:
            body = part[: rows * block].view(rows, block)
            torch.amax(body, dim=1, out=out[first : first + rows])
        if part.numel() > rows * block:
            out[first + rows] = part[rows * block :].amax()
    return out


def exact(where: np.ndarray, magnitude: np.ndarray, k: int) -> Tensor:
    """The k largest of the candidates; `where` is ascending, and so is the result."""
    bound = kth_largest(magnitude, k)
    chosen = magnitude > bound
    missing = k - np.count_nonzero(chosen)
    chosen[np.flatnonzero(magnitude == bound)[:missing]] = True
    out = where[chosen].astype(np.int32)
    assert out.size == k, f"{out.size} of {k} entries: u or its maxima are not finite"
    return torch.from_numpy(out)


def padded(u: Tensor, chosen: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32 indices and values of the chosen entries, with (size, 0) behind them; their count."""
    indices = torch.full((capacity,), u.numel(), dtype=torch.int32)
    values = torch.zeros(capacity, dtype=u.dtype)
    indices[: chosen.numel()] = chosen
    values[: chosen.numel()] = u[chosen]
    return indices, values, torch.tensor(chosen.numel(), dtype=torch.int32)


def kth_largest(x: np.ndarray, k: int) -> float:
    """numpy's introselect is twice as fast here as torch.topk."""
    return float(np.partition(x, x.size - k)[x.size - k])


def above_cpu(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, block: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """See `above`."""
    return padded(u, _chosen(u, threshold, capacity, maxima, block), capacity)


def _chosen(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None, block: int
) -> Tensor:
    # A Python number would be rounded to fp16 for an fp16 vector, a numpy one is not.
    entries, bound = array(u), np.float32(threshold)
    if not capacity:
        return torch.empty(0, dtype=torch.int32)
    if maxima is None:
        magnitude = np.abs(entries)
        where = np.flatnonzero(magnitude > bound)
        magnitude = magnitude[where]
    else:
        blocks = np.flatnonzero(array(maxima) > bound)
        if blocks.size > capacity:  # so do their entries, and nearly all may pass
            return topk_cpu(u, capacity, maxima, block)
        where, magnitude = candidates(entries, blocks, block, bound, np.greater)
    if where.size > capacity:
        return exact(where, magnitude, capacity)
    return torch.from_numpy(where.astype(np.int32))


_select_on = versions(
    _with_values(topk_torch),
    cpu=_with_values(topk_cpu),
    triton="gradwire.kernels.triton.select.entry.topk_triton",
)
_above_on = versions(
    above_torch, cpu=above_cpu, triton="gradwire.kernels.triton.select.entry.above_triton"
)
