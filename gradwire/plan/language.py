"""Sizes of language models that people name: gpt2, 1B, 7B, 70B, ..."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gradwire.errors import ConfigError
from gradwire.plan.machine import Machine
from gradwire.plan.workload import Workload, by_shapes

_BATCH = 8
"""Sequences per worker, unless given."""


@dataclass(frozen=True)
class LanguageModel:
    """Decoder-only transformer; the sizes are those of the published model `like`.

    keys: the width of keys and of values. inner: the inner width of the MLP.
    window: tokens of a sequence, for the FLOP of a step.
    """

    like: str
    layers: int
    width: int
    inner: int
    keys: int
    words: int
    window: int = 2048
    tied: bool = False

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of the parameters, first layer first."""
        width, inner, keys = self.width, self.inner, self.keys
        block = [
            (width,), (width, width), (keys, width), (keys, width), (width, width), (width,),
            (inner, width), (inner, width), (width, inner),
        ]  # fmt: skip
        yield (self.words, width)
        for _ in range(self.layers):
            yield from block
        yield (width,)
        if not self.tied:
            yield (self.words, width)


class _GPT2(LanguageModel):
    def shapes(self) -> Iterator[tuple[int, ...]]:
        width = self.width
        norm = [(width,), (width,)]
        block = [
            *norm, (width, 3 * width), (3 * width,), (width, width), (width,),
            *norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,),
        ]  # fmt: skip
        yield from ((self.words, width), (self.window, width))
        for _ in range(self.layers):
            yield from block
        yield from norm


_MODELS = {
    "gpt2": _GPT2("GPT-2", 12, 768, 3072, 768, 50_257, 1024, tied=True),
    "1b": LanguageModel("Llama 3.2 1B", 16, 2048, 8192, 512, 128_256, tied=True),
    "3b": LanguageModel("Llama 3.2 3B", 28, 3072, 8192, 1024, 128_256, tied=True),
    "7b": LanguageModel("Llama 2 7B", 32, 4096, 11_008, 4096, 32_000),
    "8b": LanguageModel("Llama 3.1 8B", 32, 4096, 14_336, 1024, 128_256),
    "13b": LanguageModel("Llama 2 13B", 40, 5120, 13_824, 5120, 32_000),
    "70b": LanguageModel("Llama 3.1 70B", 80, 8192, 28_672, 1024, 128_256),
}
"""By name; a capital B is taken too."""


def language_sizes() -> dict[str, int]:
    """Return the number of parameters by name."""
    return {
        name: sum(math.prod(shape) for shape in model.shapes()) for name, model in _MODELS.items()
    }


def by_language_model(
    name: str, device: Machine, batch: int | None, seconds: float | None
) -> Workload | None:
    """Return the workload of a language model by name; None for other names.

    Without `seconds`, 6 FLOP per parameter and token at the device's rate of large products.
    """
    model = _MODELS.get(name.strip().lower())
    if model is None:
        return None
    batch = _BATCH if batch is None else batch
    if batch < 1:
        raise ConfigError(f"batch must be at least 1, got {batch}")
    shapes = list(model.shapes())
    label = f"{name.strip()} (as {model.like})"
    known = by_shapes(shapes, label, 0.0 if seconds is None else seconds, "adamw")
    if seconds is not None:
        return known
    tokens = batch * model.window
    return known.guessed(
        6.0 * known.entries * tokens / device.matmul,
        f"{batch} sequences of {model.window:,} tokens per worker",
    )
