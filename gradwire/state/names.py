"""The names that state is kept under."""

from torch import nn


def parameter_names(model: nn.Module) -> dict[int, str]:
    """id(parameter) -> name without what wrappers put into it; those that need gradients."""
    return {
        id(parameter): plain_name(name)
        for name, parameter in unwrapped(model).named_parameters()
        if parameter.requires_grad
    }


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DDP."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
