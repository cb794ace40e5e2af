"""How a worker chooses: u -> Sparse, one file a method.

A method is a function `(u, k, memory, scan, *, options...) -> Sparse`, pure but for `memory`. To
add one, write it in a file of its own and name it in METHODS.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.compress.deft import deft, deft_learns
from gradwire.compress.dense import dense
from gradwire.compress.exdyna import exdyna, exdyna_learns
from gradwire.compress.micro import micro, micro_learns
from gradwire.compress.partition import share
from gradwire.compress.randk import randk
from gradwire.compress.topk import topk
from gradwire.types import Memory, Sparse


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

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.run) or "").splitlines()[0]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword-only arguments of the function, with their defaults."""
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(topk),
        Method(randk, common=lambda options: options.get("shared", True)),
        Method(micro, exchange="union", share=share, learns=micro_learns),
        Method(exdyna, exchange="union", share=share, learns=exdyna_learns),
        Method(deft, exchange="union", share=share, learns=deft_learns),
        Method(dense, common=lambda options: True),
    )
}
