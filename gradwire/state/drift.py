"""Drift watch: compare the parameters of all replicas, bit by bit, every N steps."""

import weakref
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradwire.errors import ConfigError, DriftError
from gradwire.hashing import splitmix64_
from gradwire.ranks.group import Group
from gradwire.state.names import plain_name, unwrapped
from gradwire.torch_internals import ignored_names

WORDS_CPU, WORDS_GPU = 2**16, 2**22
"""Words per pass: as many as a core's cache holds; on GPUs enough to hide the launch."""


def digest(tensor: Tensor) -> Tensor:
    """Return 64 bits (0-d int64, on the device) that depend on every bit of `tensor` and its place.

    The digest is the sum over i of mix(2^32 i + word i), mod 2^64. mix is the function that
    SplitMix64 (Steele, Lea, Flood 2014) applies to its counter. Because mix is one to one, a change
    in one word always changes the digest; any other change does so but for once in 2^64. The sum is
    of integers, so its order does not matter.
    """
    flat = tensor.detach().reshape(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.dtype.itemsize, torch.int32))
    step = WORDS_GPU if words.is_cuda else WORDS_CPU
    count = min(step, words.numel())
    places = torch.arange(count, dtype=torch.int64, device=words.device) << 32
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        keys = places[: part.numel()] + part
        total += splitmix64_(keys.add_(start << 32)).sum()
    return total


class Watch:
    """Comparison of the parameters of `model` over all ranks, at every `every`-th step.

    Frozen parameters take part; parameters that DDP was told to ignore do not. Buffers do not
    either, because ranks may differ in them. The comparison costs a pass over the parameters, 24
    bytes per rank and, on CUDA, one wait for the device, without which no error could be raised.
    """

    def __init__(self, model: nn.Module | None, every: int) -> None:
        if model is None:
            raise ConfigError(
                f"watch={every} needs the parameters: use gradwire.attach, or State(model=model)"
            )
        # Weak, because the model holds the hook, and the hook holds this watch.
        self._model = weakref.ref(unwrapped(model))
        self._every = every

    def due(self, steps: int) -> bool:
        """Return True if ranks are to be compared after `steps` steps."""
        return steps % self._every == 0

    @torch.no_grad()
    def check(self, group: Group, device: torch.device, steps: int) -> None:
        """Raise DriftError on every rank unless all hold the same bits. A collective call."""
        names, digests = self._digests(device)
        rows = group.compare(
            "watch", steps=steps, parameters=len(names), digest=int(digest(digests))
        )
        for words, field in (("steps taken", "steps"), ("parameters", "parameters")):
            rank = next((r for r, row in enumerate(rows) if row[field] != rows[0][field]), None)
            if rank is not None:
                raise DriftError(
                    f"replicas differ: rank {rank} has {rows[rank][field]} {words}, rank 0 has "
                    f"{rows[0][field]}. All ranks must build, load and step alike."
                )
        if any(row != rows[0] for row in rows):
            raise DriftError(_difference(names, group.all_gather(digests).tolist(), steps))

    def _digests(self, device: torch.device) -> tuple[list[str], Tensor]:
        watched = self._watched()
        digests = torch.stack([digest(p).to(device) for p in watched.values()])
        return list(watched), digests

    def _watched(self) -> dict[str, Tensor]:
        model = self._model()
        assert model is not None, "a step of a model that is gone"
        ignored = ignored_names(model)
        return {plain_name(n): p for n, p in model.named_parameters() if n not in ignored}


def _difference(names: Sequence[str], table: Sequence[Sequence[int]], steps: int) -> str:
    """Return the error text: the ranks that differ from the majority, or from the first ranks."""
    columns = list(zip(*table, strict=True))
    differ = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    column = columns[differ[0]]
    usual = Counter(column).most_common(1)[0][0]
    differing = [str(rank) for rank, value in enumerate(column) if value != usual]
    who = f"ranks {', '.join(differing)} differ"
    if len(differing) == 1:
        who = f"rank {differing[0]} differs"
    return (
        f"replicas differ after {steps} steps: {who} from rank {column.index(usual)} in "
        f"{names[differ[0]]!r}, the first of {len(differ)} parameters that differ. Load the last "
        f"checkpoint on all ranks; change parameters only alike on all of them."
    )
