"""Starting weights."""

from torch import nn


def xavier_(model: nn.Module) -> nn.Module:
    """`model` with Xavier-uniform weights and zero biases in its linear and convolution layers,
    and in the four gates of its LSTM layers."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.LSTM):
            for name, values in layer.named_parameters():
                if name.startswith("bias"):
                    nn.init.zeros_(values)
                else:
                    for gate in values.chunk(4):
                        nn.init.xavier_uniform_(gate)
    return model


def kaiming_(model: nn.Module) -> nn.Module:
    """`model` with Kaiming-normal convolutions (fan out, ReLU) and Xavier-uniform linear layers."""
    xavier_(model)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


def uniform_(model: nn.Module, bound: float) -> nn.Module:
    """`model` with every parameter uniform in [-bound, bound]."""
    for values in model.parameters():
        nn.init.uniform_(values, -bound, bound)
    return model
