"""Small tensors that belong to a stream: counters that are zero between launches, and flags."""

import torch
from torch import Tensor

from gradwire.kernels.triton.select.turns import WORDS
from gradwire.torch_internals import raw_stream

_FLAGS = 256
"""Flags that one launch makes."""
_kept: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}
_flags: dict[tuple[torch.device, int], list[Tensor]] = {}


def _capturing(device: torch.device) -> bool:
    """Return True if the current stream is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> tuple[torch.device, int]:
    if device.type != "cuda":
        return device, 0
    return device, raw_stream(device.index)


def workspace(words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the counters of `select/turns.py`, and scratch of `words`.

    The counters are zero before and after each launch. Both tensors belong to the current stream,
    so one launch at a time uses them. A graph may be replayed on any stream, and therefore gets its
    own.
    """
    if _capturing(device):
        zero = torch.zeros(WORDS, dtype=torch.int32, device=device)
        return zero, torch.empty(words, dtype=torch.int32, device=device)
    here = _stream(device)
    kept = _kept.get(here)
    if kept is None or kept[1].numel() < words:
        zero = torch.zeros(WORDS, dtype=torch.int32, device=device) if kept is None else kept[0]
        kept = _kept[here] = zero, torch.empty(words, dtype=torch.int32, device=device)
    return kept


def true_flag(device: torch.device) -> Tensor:
    """Return a 0-d bool that is True and that nobody else has.

    One launch makes a whole supply of them.
    """
    if _capturing(device):
        return torch.ones((), dtype=torch.bool, device=device)
    here = _stream(device)
    ready = _flags.get(here)
    if not ready:
        ready = _flags[here] = list(torch.ones(_FLAGS, dtype=torch.bool, device=device).unbind())
    return ready.pop()
