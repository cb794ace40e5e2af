"""Starting weights."""

from torch import nn


def xavier_(model: nn.Module) -> nn.Module:
    """`model` with Xavier-uniform weights and zero biases in its linear and convolution layers."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def kaiming_(model: nn.Module) -> nn.Module:
    """`model` with Kaiming-normal convolutions (fan out, ReLU) and Xavier-uniform linear layers."""
    xavier_(model)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model
