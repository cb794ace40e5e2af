"""Parameter names without what wrappers add to them: the keys of all state."""

from torch import nn

from gradwire.torch_internals import COMPILED, uncompiled


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return id(parameter) -> plain name of each parameter that needs a gradient."""
    return {
        id(parameter): plain_name(name)
        for name, parameter in unwrapped(model).named_parameters()
        if parameter.requires_grad
    }


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile and DDP."""
    while (inner := uncompiled(model)) is not model and isinstance(inner, nn.Module):
        model = inner
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def plain_name(name: str) -> str:
    """Return a parameter's name without what torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != COMPILED)
