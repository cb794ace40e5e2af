"""How a worker chooses: u -> Sparse, one file a method.

A method is a function `(u, k, memory, scan, *, options...) -> Sparse`, pure but for `memory`. To
add one, write it in a file of its own and name it in METHODS.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.compress.bisect import MOST, bisect
from gradwire.compress.chunked import check_chunked, chunked, chunked_group, chunked_room
from gradwire.compress.dense import dense
from gradwire.compress.dgc import check_dgc, dgc
from gradwire.compress.gaussiank import check_gaussiank, gaussiank, gaussiank_room
from gradwire.compress.mstopk import mstopk
from gradwire.compress.parts.deft import deft, deft_learns
from gradwire.compress.parts.exdyna import exdyna, exdyna_learns
from gradwire.compress.parts.micro import micro, micro_learns
from gradwire.compress.parts.partition import share
from gradwire.compress.randk import check_randk, draw_early, keeps_rest, randk
from gradwire.compress.sidco import sidco
from gradwire.compress.threshold import check_threshold, threshold
from gradwire.compress.thresholds import check_capacity, room
from gradwire.compress.topk import topk
from gradwire.compress.trimmed import trimmed
from gradwire.kernels.topk import group_size
from gradwire.types import Memory, Sparse


def _for_topk(k: int, size: int, device: torch.device, options: Mapping[str, Any]) -> int:
    return group_size(size, k, device)


@dataclass(frozen=True)
class Method:
    """A way of choosing: its function, and what the function says of itself."""

    run: Callable[..., Sparse]
    common: Callable[[Mapping[str, Any]], bool] = lambda options: False
    """Whether every rank chooses the same indices, which then do not travel."""
    exchange: str = ""
    """The only exchange it works with, if there is one."""
    share: Callable[[int, int, int], int] = lambda k, size, ranks: k
    """(k, size, ranks) -> entries one worker's message has room for."""
    learns: Callable[[Memory, Sparse, int], None] | None = None
    """(memory, agreed, k): takes note of the entries that all workers agreed on."""
    capacity: Callable[[int, int, Mapping[str, Any]], int] = lambda k, size, options: k
    """(k, size, all options) -> the most entries it chooses, for which a message has room."""
    feedback: Callable[[Mapping[str, Any]], bool] = lambda options: True
    """Whether what it does not choose is kept for the next step."""
    group: Callable[[int, int, torch.device, Mapping[str, Any]], int] = _for_topk
    """(k, size, device, all options) -> entries a group whose maxima the scan leaves; 0: none."""
    rough: bool = False
    """Whether it asks these maxima only which groups to look at: then 16 bits of them will do."""
    early: Callable[[Tensor, int, Memory, Mapping[str, Any]], None] | None = None
    """(u, k, memory, all options): begins what it can do while u, of which only the shape is known,
    is being made."""
    check: Callable[[Mapping[str, Any]], None] = lambda options: None
    """Raises for values of its options that cannot work."""

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.run) or "").splitlines()[0]

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The keyword-only arguments of the function, with their defaults."""
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def room(self, k: int, size: int, options: Mapping[str, Any]) -> int:
        """The capacity of its messages with these options."""
        return self.capacity(k, size, {**self.options, **options})

    def begin(self, u: Tensor, k: int, memory: Memory, options: Mapping[str, Any]) -> None:
        """What comes before the scan."""
        if self.early is not None:
            self.early(u, k, memory, {**self.options, **options})

    def group_of(self, k: int, size: int, device: torch.device, options: Mapping[str, Any]) -> int:
        """The groups whose maxima it wants from the scan, with these options."""
        return self.group(k, size, device, {**self.options, **options})


def _times_k(k: int, size: int, options: Mapping[str, Any]) -> int:
    return room(k, size, options["capacity"])


def _for_capacity(k: int, size: int, device: torch.device, options: Mapping[str, Any]) -> int:
    return group_size(size, _times_k(k, size, options), device)


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(topk, rough=True),
        Method(gaussiank, capacity=gaussiank_room, rough=True, check=check_gaussiank),
        Method(dgc, rough=True, check=check_dgc),
        Method(trimmed),
        Method(bisect, rough=True, capacity=lambda k, size, options: room(k, size, MOST)),
        Method(mstopk),
        Method(sidco, capacity=_times_k, check=check_capacity),
        Method(
            threshold, capacity=_times_k, group=_for_capacity, rough=True, check=check_threshold
        ),
        Method(chunked, capacity=chunked_room, group=chunked_group, check=check_chunked),
        Method(
            randk,
            common=lambda options: options.get("shared", True),
            feedback=keeps_rest,
            group=lambda k, size, device, options: 0,
            early=draw_early,
            check=check_randk,
        ),
        Method(micro, exchange="union", share=share, learns=micro_learns),
        Method(exdyna, exchange="union", share=share, learns=exdyna_learns),
        Method(deft, exchange="union", share=share, learns=deft_learns),
        Method(dense, common=lambda options: True),
    )
}
