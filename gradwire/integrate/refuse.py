"""Checks that refuse models and optimisers with which gradwire would silently go wrong."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.errors import AttachError
from gradwire.torch_internals import (
    divides_by_all_ranks,
    has_python_reducer,
    is_joining,
    steps_in_backward,
    takes_step_hooks,
    uncompiled,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of parameters; residuals are fp32, so a wider dtype would lose digits."""


def is_sharded(model: object) -> bool:
    """Return True if fully_shard was called on the model, or on a part of it."""
    if "torch.distributed.fsdp" not in sys.modules or not isinstance(model, nn.Module):
        # The import takes seconds. While nobody has imported FSDP2, no model is sharded.
        return False
    kind = getattr(sys.modules["torch.distributed.fsdp"], "FSDPModule", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def unwrap_ddp(model: object) -> DistributedDataParallel:
    """Return the DDP module inside `model`, which may be compiled; raise for anything else."""
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        return inner
    hint = "wrap it first: ddp = DistributedDataParallel(model)"
    if type(inner).__name__ == "FullyShardedDataParallel":
        hint = "FSDP1 has no hook for it; use fully_shard and replicate_group"
    if isinstance(inner, nn.Module) and any(
        isinstance(m, DistributedDataParallel) for m in inner.modules()
    ):
        hint = "pass the DistributedDataParallel module inside it"
    raise AttachError(
        f"attach needs a DistributedDataParallel model, got {type(model).__name__}: {hint}"
    )


def refuse_unsupported(ddp: DistributedDataParallel) -> None:
    """Raise AttachError for a model that DDP can train and gradwire cannot."""
    if getattr(ddp, "mixed_precision", None) is not None:
        raise AttachError(
            "DDP's mixed_precision reduces gradients in another dtype behind the hook; use "
            "torch.autocast instead"
        )
    if has_python_reducer(ddp):
        raise AttachError(
            "DDP's python_reducer passes hooks no bucket; set torch._dynamo.config.optimize_ddp "
            "to 'ddp_optimizer'"
        )
    for name, module in ddp.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise AttachError(
                f"{name or 'the model'}: sparse embedding gradients; use sparse=False"
            )
    devices = {p.device for p in ddp.module.parameters() if p.requires_grad}
    if len(devices) > 1:
        raise AttachError(f"the parameters are on {len(devices)} devices; a replica must be on one")
    for name, parameter in ddp.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if steps_in_backward(parameter):
            raise AttachError(
                f"{name}: its optimizer runs in the backward pass, before gradients are averaged"
            )
        if parameter.dtype not in DTYPES:
            raise AttachError(
                f"{name} is {parameter.dtype}; residuals are fp32: use fp32, bf16, fp16"
            )


def refuse_optimizer(optimizer: object, scaler: object) -> None:
    """Raise AttachError for what is no optimiser, or one whose steps a scaler cannot observe."""
    if not isinstance(optimizer, Optimizer) or not (scaler is None or takes_step_hooks(optimizer)):
        raise AttachError(
            f"optimizer must be the torch.optim.Optimizer that steps, or that scaler.step calls, "
            f"got {type(optimizer).__name__}: give the one inside a wrapper"
        )


def refuse_for_local_steps(
    model: object, optimizer: object, has_islands: bool = False
) -> list[Optimizer]:
    """Return the optimisers; raise AttachError for what local steps cannot serve.

    has_islands: replicate_group was given.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"local_steps needs a torch.nn.Module, got {type(model).__name__}")
    sharded = _refuse_wrappers(model, has_islands)
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [each for each in given if isinstance(each, Optimizer)]
    if len(optimizers) < len(given) or not given:
        kinds = [type(each).__name__ for each in given if not isinstance(each, Optimizer)]
        raise AttachError(
            f"local_steps needs the torch optimiser of the inner steps, got "
            f"{', '.join(kinds) or 'an empty list'}"
        )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise AttachError("the model has no parameter that needs a gradient")
    for name, parameter in trained.items():
        is_part = hasattr(parameter, "placements") and not sharded
        if is_part or parameter.dtype not in DTYPES:
            kind = "sharded" if is_part else str(parameter.dtype)
            raise AttachError(f"{name} is {kind}: local_steps takes whole fp32, bf16 or fp16 ones")
    if len({p.device for p in trained.values()}) > 1:
        raise AttachError("the parameters are on several devices; a replica must be on one")
    _refuse_owners(model, optimizers)
    return optimizers


def _refuse_wrappers(model: nn.Module, has_islands: bool) -> bool:
    """Raise AttachError for a wrapper that cannot be, or that lacks its islands.

    Return True if fully_shard was called on the model, whose shards are then all there.
    """
    outer, sharded = uncompiled(model), is_sharded(model)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and (module is not outer or sharded):
            raise AttachError(
                "local_steps got a model with a DistributedDataParallel module inside: wrap the "
                "whole model in an island, or nothing"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise AttachError("local_steps got a sharded model (FSDP1): pass the plain model")
    wrapped = isinstance(outer, DistributedDataParallel)
    if wrapped and not has_islands:
        raise AttachError(
            "local_steps got a DistributedDataParallel model, which averages every step: pass the "
            "plain model, or replicate_group=... for islands of DDP"
        )
    if sharded and not has_islands:
        raise AttachError(
            "local_steps got a sharded model without replicate_group: give "
            'mesh["replicate"].get_group(), the axis that fully_shard did not cut'
        )
    if has_islands and not (sharded or wrapped):
        raise AttachError(
            "replicate_group is for a model in fully_shard or DistributedDataParallel: for a plain "
            "model give group="
        )
    if sharded:
        from gradwire.integrate.local_steps.shards import refuse_shards

        refuse_shards(model)
    return sharded


def _refuse_owners(model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Raise AttachError unless every optimiser holds parameters of the model and no other has."""
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, str] = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if not any(place in names for place in held):
            raise AttachError(
                f"{kind} holds none of the model's parameters: make it of model.parameters()"
            )
        if any(place not in names for place in held):
            raise AttachError(
                f"{kind} has a parameter that the model has not: it would never be averaged"
            )
        for place in held:
            if place in owners:
                raise AttachError(
                    f"{names[place]} is in two optimisers, {owners[place]} and {kind}: "
                    f"leave it to one of them"
                )
            owners[place] = kind


def refuse_shrinking_join(ddp: DistributedDataParallel | None) -> None:
    """Raise if Join divides by the number of ranks that are left; gradwire divides by all ranks."""
    if ddp is not None and not divides_by_all_ranks(ddp):
        raise AttachError(
            "Join(..., divide_by_initial_world_size=False) is not supported: gradwire's mean is "
            "over all ranks; use True"
        )


def refuse_watched_join(ddp: DistributedDataParallel | None) -> None:
    """Raise inside Join, because a rank that has joined takes no steps, and so differs."""
    if ddp is not None and is_joining(ddp):
        raise AttachError("watch does not work inside Join, where replicas differ: use watch=0")
