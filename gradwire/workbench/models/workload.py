"""The work of a network by name, for the planner: the multiplications of each parameter."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import ConfigError
from gradwire.plan.machine import Machine
from gradwire.plan.workload import Shapes, Workload, check_seconds, shares_of
from gradwire.workbench.models import ModelSpec, model_spec

FRAMES = 200
"""Frames of a spoken sentence, for a network that takes inputs of any length."""


def workload_by_name(
    name: str, device: Machine, batch: int | None, seconds: float | None
) -> Workload:
    """Return the workload of the network `name`; seconds: of one step, computed if None.

    The computed seconds are the network's FLOP / the device's sustained FLOP/s.
    """
    spec = model_spec(name)
    batch = spec.batch if batch is None else batch
    if batch < 1:
        raise ConfigError(f"batch must be at least 1, got {batch}")
    shapes, macs = _profile(name)
    # A multiplication comes with an addition (2); the backward pass costs two forward passes (3).
    flops = 3 * 2 * batch * sum(macs)
    return Workload(
        name,
        shapes,
        shares_of(macs),
        flops / device.flops if seconds is None else check_seconds(seconds),
        seconds is not None,
        spec.optimizer,
        work=f"{batch} examples per worker",
    )


@lru_cache(maxsize=16)
def _profile(name: str) -> tuple[Shapes, tuple[float, ...]]:
    """Return shape and multiplications of each parameter, the last layer first."""
    spec = model_spec(name)
    with torch.device("meta"):
        model = spec.build()
    macs = _multiplications(model, spec)
    shapes = [(n, tuple(p.shape)) for n, p in model.named_parameters() if p.requires_grad][::-1]
    names = {name: id(p) for name, p in model.named_parameters()}
    return (
        tuple(shape for _, shape in shapes),
        tuple(macs.get(names[name], 0.0) for name, _ in shapes),
    )


def _multiplications(model: nn.Module, spec: ModelSpec) -> dict[int, float]:
    """Count the multiplications of one example's forward pass, by the id of the weight.

    A head that shares its weight with the embedding has another name for it.
    """
    counts: dict[int, float] = {}
    handles = []

    def count(module: nn.Module, _: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        channels = y.shape[-1] if not isinstance(module, nn.Conv1d | nn.Conv2d) else y.shape[1]
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                done = parameter.numel() * (y.numel() // channels)
                counts[id(parameter)] = counts.get(id(parameter), 0.0) + done

    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear | nn.LSTM):
            handles.append(module.register_forward_hook(count))
    with torch.no_grad():
        model.eval()(*_example_inputs(spec, next(model.parameters()).dtype))
    for handle in handles:
        handle.remove()
    return counts


def _example_inputs(spec: ModelSpec, dtype: torch.dtype) -> list[Tensor]:
    if spec.task in ("language", "bytes"):
        return [torch.zeros(1, *spec.shape, dtype=torch.long, device="meta")]
    if spec.task == "speech":
        lengths = torch.full((1,), FRAMES, dtype=torch.int64, device="meta")
        return [torch.zeros(1, *spec.shape, FRAMES, dtype=dtype, device="meta"), lengths]
    return [torch.zeros(1, *spec.shape, dtype=dtype, device="meta")]
