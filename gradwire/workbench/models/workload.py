"""A network's work by name, for the planner: the multiplications of each of its parameters."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import ConfigError
from gradwire.plan.machine import Machine
from gradwire.plan.workload import Shapes, Workload, check_seconds, shares_of
from gradwire.workbench.models import ModelSpec, spec

FRAMES = 200
"""Of a spoken sentence, where the network has no fixed input."""


def by_name(name: str, device: Machine, batch: int | None, seconds: float | None) -> Workload:
    """A network by name; its seconds, unless given, are FLOP / sustained FLOP/s."""
    found = spec(name)
    batch = found.batch if batch is None else batch
    if batch < 1:
        raise ConfigError(f"batch must be at least 1, got {batch}")
    shapes, macs = _profile(name)
    flops = 3 * 2 * batch * sum(macs)
    return Workload(
        name,
        shapes,
        shares_of(macs),
        flops / device.flops if seconds is None else check_seconds(seconds),
        seconds is not None,
    )


@lru_cache(maxsize=16)
def _profile(name: str) -> tuple[Shapes, tuple[float, ...]]:
    """Shape and multiplications of each parameter, the last layer's first."""
    found = spec(name)
    with torch.device("meta"):
        model = found.build()
    macs = _macs(model, found)
    own = [(n, tuple(p.shape)) for n, p in model.named_parameters() if p.requires_grad][::-1]
    return tuple(shape for _, shape in own), tuple(macs.get(name, 0.0) for name, _ in own)


def _macs(model: nn.Module, found: ModelSpec) -> dict[str, float]:
    """Multiplications of one example's forward pass, by name of the weight."""
    out: dict[str, float] = {}
    handles = []

    def count(name: str) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            channels = y.shape[-1] if not isinstance(module, nn.Conv1d | nn.Conv2d) else y.shape[1]
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    key = f"{name}.{own}" if name else own
                    out[key] = out.get(key, 0.0) + parameter.numel() * (y.numel() // channels)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear | nn.LSTM):
            handles.append(module.register_forward_hook(count(name)))
    with torch.no_grad():
        model.eval()(*_inputs(found, next(model.parameters()).dtype))
    for handle in handles:
        handle.remove()
    return out


def _inputs(found: ModelSpec, dtype: torch.dtype) -> list[Tensor]:
    if found.task == "language":
        return [torch.zeros(1, *found.shape, dtype=torch.long, device="meta")]
    if found.task == "speech":
        lengths = torch.full((1,), FRAMES, dtype=torch.int64, device="meta")
        return [torch.zeros(1, *found.shape, FRAMES, dtype=dtype, device="meta"), lengths]
    return [torch.zeros(1, *found.shape, dtype=dtype, device="meta")]
