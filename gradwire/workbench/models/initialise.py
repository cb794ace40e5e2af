"""Initial weights of the networks. Each function changes its model in place, and returns it."""

from torch import nn


def xavier_(model: nn.Module) -> nn.Module:
    """Set weights to Xavier-uniform and biases to zero, in linear, convolution and LSTM layers.

    Each of the four gates of an LSTM is one matrix to the Xavier bound.
    """
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
    """Set convolutions to Kaiming-normal (fan out, ReLU) and linear layers to Xavier-uniform."""
    xavier_(model)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


def uniform_(model: nn.Module, bound: float) -> nn.Module:
    """Set every parameter to uniform values in [-bound, bound]."""
    for values in model.parameters():
        nn.init.uniform_(values, -bound, bound)
    return model
