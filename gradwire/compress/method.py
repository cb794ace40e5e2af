"""Method: the function that chooses entries, and the function's properties."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.kernels.select import block_size
from gradwire.types import Memory, Registered, Scan, Sparse

Options = Mapping[str, Any]
"""All options of a method: the user's options, and the defaults of the others."""


def _block_for_topk(k: int, size: int, device: torch.device, options: Options) -> int:
    return block_size(size, k, device)


@dataclass(frozen=True)
class Method(Registered):
    """Way of choosing entries. Only `run` is needed; every other field has a default."""

    run: Callable[..., Sparse]
    """(u, k, memory, scan, *, options...) -> the entries that this rank sends."""
    common: Callable[[Options], bool] = lambda options: False
    """True: every rank chooses the same indices, which then do not travel."""
    exchange: str = ""
    """The only exchange that the method works with; empty: it works with every exchange."""
    capacity: Callable[[int, int, Options], int] = lambda k, size, options: k
    """(k, size, options) -> the most entries that the method chooses."""
    capacity_per_rank: Callable[[int, int, int], int] = lambda k, size, ranks: k
    """(k, size, ranks) -> the entries that one rank's message has room for."""
    learns: Callable[[Memory, Sparse, int], None] | None = None
    """(memory, agreed, k): takes note of the entries that all ranks agreed on."""
    keeps_rest: Callable[[Options], bool] = lambda options: True
    """False: entries that are not chosen are forgotten."""
    block: Callable[[int, int, torch.device, Options], int] = _block_for_topk
    """(k, size, device, options) -> entries per maximum that the scan leaves; 0 for no maxima."""
    maxima16: bool = False
    """True: the maxima only tell which blocks to skip, so the scan may store them in 16 bits."""
    prefetch: Callable[[Tensor, int, Memory, Options], None] | None = None
    """(u, k, memory, options): begins the work that needs no values of u, while u is being made."""
    varies: Callable[[Options], bool] = lambda options: False
    """True: messages are as long as the longest of this step, and ranks exchange their lengths."""
    check: Callable[[Options, Options], None] = lambda options, user_options: None
    """(options, user_options): raises for values that fail; user_options has no defaults."""

    @property
    def name(self) -> str:
        return self.run.__name__

    def bind(self, user_options: Options) -> "BoundMethod":
        """Return the method with these options applied."""
        return BoundMethod(self, {**self.options, **user_options})

    def check_options(self, user_options: Options) -> None:
        """Raise ConfigError for options of this method that cannot work."""
        self.check({**self.options, **user_options}, user_options)


class BoundMethod:
    """Method with its options."""

    def __init__(self, method: Method, options: Options) -> None:
        self.method = method
        self.options = options
        self.is_common = method.common(options)
        """True: every rank chooses the same indices."""
        self.keeps_rest = method.keeps_rest(options)
        """False: entries that are not chosen are forgotten."""
        self.varies = method.varies(options)
        """True: the length of a message is known when its entries are chosen."""

    def choose(self, u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
        """Choose about k entries of u."""
        return self.method.run(u, k, memory, scan, **self.options)

    def prefetch(self, u: Tensor, k: int, memory: Memory) -> None:
        """Begin the work that needs no values of u, while u is being made."""
        if self.method.prefetch is not None:
            self.method.prefetch(u, k, memory, self.options)

    def learn(self, memory: Memory, agreed: Sparse, k: int) -> None:
        """Take note of the entries that all ranks agreed on."""
        if self.method.learns is not None:
            self.method.learns(memory, agreed, k)

    def capacity(self, k: int, size: int, ranks: int = 1) -> int:
        """Return the entries that one rank's message has room for."""
        most = self.method.capacity(k, size, self.options)
        return self.method.capacity_per_rank(most, size, ranks)

    def block(self, k: int, size: int, device: torch.device) -> int:
        """Return the entries per maximum that the scan is to leave; 0 for no maxima."""
        return self.method.block(k, size, device, self.options)
