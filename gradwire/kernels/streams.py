"""Tensors that one CUDA stream makes and another one drops."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def keep_for_stream(owner: Any, device: torch.device) -> None:
    """Whenever a tensor that `owner` holds is dropped, its memory waits for the current stream.

    PyTorch gives memory back to the stream that it was made on, at once. What `attach` or a
    checkpoint has made on the user's stream is dropped in a step, which has a stream of its own:
    the backward pass would write over it before it was read.
    """
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        for tensor in tensors_in(owner):
            if tensor.is_cuda:
                tensor.record_stream(stream)


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """The tensors in containers and in objects of this package, however deep."""
    if isinstance(thing, Tensor):
        yield thing
        return
    inside: list[Any] = []
    if isinstance(thing, Mapping):
        inside += thing.values()
    elif isinstance(thing, list | tuple):
        inside += thing
    if type(thing).__module__.startswith("gradwire."):
        inside += vars(thing).values()
    for part in inside:
        yield from tensors_in(part)
