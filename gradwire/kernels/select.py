"""Choose entries of a vector: the k largest, or those above a threshold.

On the CPU, block maxima rule out nearly all entries before any exact comparison. The k-th largest
block maximum t is never above the k-th largest magnitude, because k blocks hold an entry of at
least t. A block whose maximum is below t therefore holds no winner. numpy compares the few entries
that remain in one thread: torch's threads wait for each other on busy cores.
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
    """Return int32 indices, ascending, of the k largest |u|; ties go to the smaller index.

    u: flat and finite.
    maxima: max |u| of every `block` consecutive entries, if a scan left them; computed otherwise.
    """
    return select(u, k, maxima, block)[0]


def select(
    u: Tensor,
    k: int,
    maxima: Tensor | None = None,
    block: int = 0,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the indices of `topk`, and the entries of u at these indices.

    last_selection (CUDA): the end of this selection is noted there.
    """
    if last_selection is None:
        return _select_on(u.device)(u, k, maxima, block)
    return _select_on(u.device)(u, k, maxima, block, last_selection)


def _with_values(version: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def select_version(
        u: Tensor, k: int, maxima: Tensor | None, block: int
    ) -> tuple[Tensor, Tensor]:
        indices = version(u, k, maxima, block)
        return indices, u[indices]

    return select_version


def block_size(size: int, k: int, device: torch.device = torch.device("cpu")) -> int:
    """Return the entries per block for choosing k of `size`; 0 if blocks would not save time."""
    if device.type == "cuda":
        if k * 2000 <= size:
            return 64
        if k * 250 <= size:
            return 32
        return 16 if k * 48 <= size else 0
    if k * 128 <= size:
        return 64
    return 32 if k * 48 <= size else 0


def above(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, block: int = 0,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the entries with |u| > threshold: int32 indices, values and count (0-d int32).

    Indices are ascending, and padded to `capacity` with (size, 0). If more entries pass, the
    `capacity` largest are taken, ties to the smaller index. A bad threshold therefore cannot flood
    the network.
    u: flat and finite. threshold: 0-d fp32 on the device of u; NaN lets nothing pass.
    maxima: max |u| of every `block` consecutive entries, if a scan left them. A block whose maximum
    does not pass is not read. last_selection (CUDA): the end of this selection is noted there.
    """
    if last_selection is None:
        return _above_on(u.device)(u, threshold, capacity, maxima, block)
    return _above_on(u.device)(u, threshold, capacity, maxima, block, last_selection)


def topk_torch(u: Tensor, k: int, maxima: Tensor | None = None, block: int = 0) -> Tensor:
    """Compute `topk` with torch ops: take all above the k-th magnitude, then the first ties."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=u.device)
    magnitude = u.abs()
    bound = torch.topk(magnitude, k, sorted=False).values.amin()
    above = magnitude > bound
    tied = magnitude == bound
    chosen = above | (tied & (tied.cumsum(0) <= k - above.sum()))
    # The spare last place takes the writes of entries that are not chosen.
    place = torch.where(chosen, chosen.cumsum(0) - 1, k)
    out = torch.empty(k + 1, dtype=torch.int32, device=u.device)
    order = torch.arange(u.numel(), dtype=torch.int32, device=u.device)
    return out.scatter_(0, place, order)[:k]


def above_torch(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, block: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `above` with torch ops.

    Entries that do not pass become zero before the largest are chosen, and padding afterwards.
    """
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
    """Compute `topk` with numpy."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32)
    if maxima is None:
        block = block_size(u.numel(), k)
        maxima = block_maxima(u, block) if block else None
    entries = as_numpy(u)
    if maxima is None or maxima.numel() <= k:
        return k_largest_of(np.arange(entries.size), np.abs(entries), k)
    largest = as_numpy(maxima)
    bound = _kth_largest(largest, k)
    indices, magnitude = entries_in_blocks(entries, np.flatnonzero(largest >= bound), block, bound)
    return k_largest_of(indices, magnitude, k)


def as_numpy(x: Tensor) -> np.ndarray:
    """Return the memory of x as a numpy array; for bf16, which numpy lacks, an fp32 copy."""
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


def entries_in_blocks(
    u: np.ndarray,
    blocks: np.ndarray,
    block: int,
    bound: float | np.floating,
    passes: np.ufunc = np.greater_equal,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries in the named blocks that pass `bound`: indices and magnitudes.

    Indices are ascending.
    """
    rows = u.size // block
    whole = blocks[blocks < rows]
    magnitude = np.abs(u[: rows * block].reshape(rows, block)[whole]).reshape(-1)
    near = np.flatnonzero(passes(magnitude, bound))
    indices = whole[near // block] * block + near % block
    magnitude = magnitude[near]
    if whole.size < blocks.size:
        tail = np.abs(u[rows * block :])
        last = np.flatnonzero(passes(tail, bound))
        indices = np.concatenate([indices, last + rows * block])
        magnitude = np.concatenate([magnitude, tail[last]])
    return indices, magnitude


def block_maxima(u: Tensor, block: int) -> Tensor:
    """Return max |u| of every `block` consecutive entries; the last block may be shorter."""
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


def k_largest_of(indices: np.ndarray, magnitude: np.ndarray, k: int) -> Tensor:
    """Return the indices, ascending, of the k largest of the candidates.

    indices: of the candidates, ascending.
    """
    bound = _kth_largest(magnitude, k)
    chosen = magnitude > bound
    missing = k - np.count_nonzero(chosen)
    chosen[np.flatnonzero(magnitude == bound)[:missing]] = True
    out = indices[chosen].astype(np.int32)
    assert out.size == k, f"{out.size} of {k} entries: u or its maxima are not finite"
    return torch.from_numpy(out)


def pad_entries(u: Tensor, chosen: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return int32 indices and values of the chosen entries, padded with (size, 0), and count."""
    indices = torch.full((capacity,), u.numel(), dtype=torch.int32)
    values = torch.zeros(capacity, dtype=u.dtype)
    indices[: chosen.numel()] = chosen
    values[: chosen.numel()] = u[chosen]
    return indices, values, torch.tensor(chosen.numel(), dtype=torch.int32)


def _kth_largest(x: np.ndarray, k: int) -> float:
    """Return the k-th largest of x. numpy is twice as fast here as torch.topk."""
    return float(np.partition(x, x.size - k)[x.size - k])


def above_cpu(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, block: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `above` with numpy."""
    return pad_entries(u, _chosen(u, threshold, capacity, maxima, block), capacity)


def _chosen(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None, block: int
) -> Tensor:
    # A Python number would be rounded to fp16 for an fp16 vector, a numpy one is not.
    entries, bound = as_numpy(u), np.float32(threshold)
    if not capacity:
        return torch.empty(0, dtype=torch.int32)
    if maxima is None:
        magnitude = np.abs(entries)
        indices = np.flatnonzero(magnitude > bound)
        magnitude = magnitude[indices]
    else:
        blocks = np.flatnonzero(as_numpy(maxima) > bound)
        if blocks.size > capacity:
            # Each of these blocks has an entry that passes, so the limit will decide.
            return topk_cpu(u, capacity, maxima, block)
        indices, magnitude = entries_in_blocks(entries, blocks, block, bound, np.greater)
    if indices.size > capacity:
        return k_largest_of(indices, magnitude, capacity)
    return torch.from_numpy(indices.astype(np.int32))


_select_on = versions(
    _with_values(topk_torch),
    cpu=_with_values(topk_cpu),
    triton="gradwire.kernels.triton.select.entry.topk_triton",
)
_above_on = versions(
    above_torch, cpu=above_cpu, triton="gradwire.kernels.triton.select.entry.above_triton"
)
