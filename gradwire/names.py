"""The names that state is kept under."""

from torch import nn


def parameter_names(model: nn.Module) -> dict[int, str]:
    """id(parameter) -> name without what wrappers put into it; those that need gradients."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return {
        id(parameter): ".".join(p for p in name.split(".") if p != "_orig_mod")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
