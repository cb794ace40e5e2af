"""Drift watch: every N steps, do all replicas still hold the same bits?"""

import weakref
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradwire.errors import ConfigError, DriftError
from gradwire.ranks.group import Group
from gradwire.state.names import plain_name, unwrapped

WORDS_CPU, WORDS_GPU = 2**16, 2**22
"""Words in one go: what a core's cache holds, or enough that launches do not count."""

FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def digest(tensor: Tensor) -> Tensor:
    """64 bits (0-d int64, on the device) that depend on every bit of `tensor` and its place.

    The sum over i of mix(2^32 i + word i), mod 2^64, where mix is what SplitMix64 (Steele, Lea,
    Flood 2014) does to its counter. mix is one to one: a change in one word is always seen, any
    other all but once in 2^64. Whole numbers: the order of adding does not matter.
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
        total += _mix(keys.add_(start << 32)).sum()
    return total


def _mix(x: Tensor) -> Tensor:
    """In place: x ^= x >> 30, x *= first factor, x ^= x >> 27, x *= second, x ^= x >> 31."""
    x = _fold(x, 30).mul_(FACTORS[0])
    x = _fold(x, 27).mul_(FACTORS[1])
    return _fold(x, 31)


def _fold(x: Tensor, shift: int) -> Tensor:
    # Shifts of int64 bring the sign in: it is masked off.
    return x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1))


class Watch:
    """Compares the parameters of `model` over all ranks at every `every`-th step.

    All of them, frozen ones too, but for those that DDP was told to ignore; no buffers, in which
    ranks may differ. It costs a pass over the parameters, 24 bytes to each rank and, on CUDA, one
    wait for the device: without it nobody could raise an error.
    """

    def __init__(self, model: nn.Module | None, every: int) -> None:
        if model is None:
            raise ConfigError(
                f"watch={every} needs the parameters: use gradwire.attach, or State(model=model)"
            )
        # The model holds the hook that holds this.
        self._model = weakref.ref(unwrapped(model))
        self._every = every

    def due(self, steps: int) -> bool:
        """Whether to look, with `steps` steps taken."""
        return steps % self._every == 0

    @torch.no_grad()
    def check(self, group: Group, device: torch.device, steps: int) -> None:
        """Raises DriftError on every rank unless all hold the same bits. A collective call."""
        names, digests = self._digests(device)
        rows = group.compare(
            "watch", steps=steps, parameters=len(names), digest=int(digest(digests))
        )
        for what, field in (("steps taken", "steps"), ("parameters", "parameters")):
            odd = next((r for r, row in enumerate(rows) if row[field] != rows[0][field]), None)
            if odd is not None:
                raise DriftError(
                    f"replicas differ: rank {odd} has {rows[odd][field]} {what}, rank 0 has "
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
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        return {plain_name(n): p for n, p in model.named_parameters() if n not in ignored}


def _difference(names: Sequence[str], table: Sequence[Sequence[int]], steps: int) -> str:
    """Which ranks do not hold what most ranks hold; where there is no majority, the later ones."""
    columns = list(zip(*table, strict=True))
    differ = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    column = columns[differ[0]]
    usual = Counter(column).most_common(1)[0][0]
    odd = [str(rank) for rank, value in enumerate(column) if value != usual]
    who = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(odd)} differ"
    return (
        f"replicas differ after {steps} steps: {who} from rank {column.index(usual)} in "
        f"{names[differ[0]]!r}, the first of {len(differ)} parameters that differ. Load the last "
        f"checkpoint on all ranks; change parameters only alike on all of them."
    )
