"""Gradients of a network in training: all different, and correlated as real ones are.

`training:MODEL@STEP` names the gradients of one worker from step STEP on, in the order of DDP's
buckets: the last layer first.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import ConfigError
from gradwire.workbench.data import Data, load_dataset
from gradwire.workbench.models import ModelSpec, model_spec

PREFIX = "training:"
ALIASES = {"gpt": "gpt-11m"}
FIRST = 150
"""The step from which gradients are taken if none is named: the loss has left its first slope."""
DIFFERENT = {"cuda": 48, "cpu": 12}
"""The number of gradients, by the device's type. Beyond these they come round again."""
BATCH = {"cuda": 32, "cpu": 4}
"""Examples per step."""
BUILDS = {"bytes": "adamw", "classify": "sgd", "": "sgd"}
"""The optimiser by the task of a network."""
MOMENTUM, CLIP = 0.9, 1.0


def is_training(name: str) -> bool:
    """Return True if the kind of data is that of a network in training."""
    return name.startswith(PREFIX)


def parse_training(name: str) -> tuple[ModelSpec, int]:
    """Return the network and the first step of a kind such as "training:gpt@150"."""
    model, at, text = name.removeprefix(PREFIX).partition("@")
    if at and not text.isdecimal():
        raise ConfigError(f"--data {name}: the step after @ is a number from 0 on, got {text!r}")
    spec = model_spec(ALIASES.get(model, model))
    if spec.task not in BUILDS:
        raise ConfigError(
            f"--data {name}: only networks for images or bytes are trained here, such as "
            f"{PREFIX}gpt and {PREFIX}resnet50"
        )
    return spec, int(text) if at else FIRST


def training_gradients(
    name: str, device: torch.device, folder: Path | None = None, seed: int = 0
) -> list[Tensor]:
    """Train the network of `name`, and return its flat fp32 gradients from the named step on.

    folder: of the data sets; without one the embedded texts and digits are used.
    """
    spec, first = parse_training(name)
    torch.manual_seed(seed)
    with torch.enable_grad():
        model = spec.build().to(device)
        batches = _batches(spec, device, folder, seed)
        parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        optimizer = _make_optimizer(spec, parameters)
        taken = []
        for step in range(first + DIFFERENT[device.type]):
            optimizer.zero_grad()
            _loss(spec, model, *next(batches)).backward()
            if step >= first:
                taken.append(torch.cat([_gradient(p).reshape(-1).float() for p in parameters]))
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
    return taken


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient, zeros where the loss does not depend on the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _make_optimizer(spec: ModelSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if BUILDS[spec.task] == "adamw":
        return torch.optim.AdamW(parameters, spec.lr, betas=(0.9, 0.95), weight_decay=0.1)
    return torch.optim.SGD(parameters, spec.lr, momentum=MOMENTUM)


def _loss(spec: ModelSpec, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a batch; products are in bf16 on CUDA."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
        scores = model(inputs)
    if spec.task == "bytes":
        scores, targets = scores.flatten(0, 1), targets.flatten()
    return F.cross_entropy(scores.float(), targets)


def _batches(
    spec: ModelSpec, device: torch.device, folder: Path | None, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for ever, drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    data = _load(spec, folder).to(device)
    while True:
        indices = torch.randint(
            data.examples, (BATCH[device.type],), dtype=torch.int64, generator=generator
        )
        inputs, targets = data.training_batch(indices, int(indices[0]))
        if spec.task != "bytes":
            # As large and of as many channels as the network takes.
            inputs = F.interpolate(inputs, spec.shape[1:], mode="bilinear")
            inputs = inputs.expand(-1, spec.shape[0], -1, -1)
        yield inputs, targets


def _load(spec: ModelSpec, folder: Path | None) -> Data:
    """Return the books or CIFAR-10 of the folder; without one, what is embedded."""
    if spec.task == "bytes":
        return load_dataset("books" if folder else "novels", folder, spec.shape)
    if folder:
        return load_dataset("cifar10", folder, (3, 32, 32))
    return load_dataset("digits", folder, (1, 28, 28))
