"""Batch norm for ranks that share a GPU."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def without_cudnn(model: nn.Module) -> None:
    """The model's batch norms are PyTorch's own from now on.

    cuDNN's, for fp32 in channels_last, need every multiprocessor at once, and wait while a
    collective runs on one (pytorch/pytorch#80259). Where ranks share a GPU that collective may be
    another rank's, waiting for this one: then nothing ever ends.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(_off)
            module.register_forward_hook(_on, always_call=True)


def _off(*_: Any) -> None:
    torch.backends.cudnn.enabled = False


def _on(*_: Any) -> None:
    torch.backends.cudnn.enabled = True
