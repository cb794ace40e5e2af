"""local_steps: exchange weights every few steps, for links too slow to exchange at every step."""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradwire.config import Config
from gradwire.errors import ConfigError
from gradwire.integrate.refuse import refuse_for_local_steps
from gradwire.integrate.versions import note_torch
from gradwire.ranks.group import Group

if TYPE_CHECKING:
    from gradwire.integrate.local_steps.handle import LocalSteps

__all__ = ["LocalSteps", "local_steps"]


def __getattr__(name: str) -> Any:
    if name != "LocalSteps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gradwire.integrate.local_steps.handle import LocalSteps

    return LocalSteps


def local_steps(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    every: int | None = None,
    *,
    recipe: str | None = None,
    outer: str | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    keep_unsent: bool | None = None,
    overlap: int | None = None,
    fragments: int | None = None,
    offload: bool | None = None,
    group: dist.ProcessGroup | Group | None = None,
    replicate_group: Any = None,
    config: Config | None = None,
    **fields: Any,
) -> "LocalSteps":
    """Exchange weights every `every` steps instead of gradients at each: DiLoCo, SparseLoCo.

        optimizer = gradwire.optim.muon(model, lr=0.004)
        local = gradwire.local_steps(model, optimizer, recipe="muon")
        for batch in batches:
            optimizer.zero_grad(); loss(model, batch).backward(); optimizer.step()
            local.step()

    Every rank trains the plain `model` with optimisers of its own: one, or a list of several. After
    `every` steps the difference of weights is compressed with error feedback and averaged. The mean
    is the gradient of an outer step. This is a collective call: ranks start from rank 0's weights.
    It takes 8 bytes per parameter, and 4 more with outer momentum.

    recipe: a set of the other arguments, by name: "muon" or "muon-wan" (`gradwire methods`). Rank 0
    prints what it stands for. Arguments that are named beside it win.
    outer: "nesterov" (lr 1, momentum 0.5; the default), or "average" (lr 1, no momentum).
    outer_lr, outer_momentum: replace these two numbers.
    keep_unsent: a rank's weights keep the differences that the rank has not sent yet. Ranks then
    differ after an exchange too. `shared()` puts the weights that all ranks share into the model,
    and `flush()` before the last exchange makes all ranks equal.
    overlap: exchange in the background while the next `overlap` inner steps run; then the update
    lands on the weights as they are by then. See `LocalSteps` for the rule. It takes 4 bytes per
    parameter and a copy of the weights; both are of one fragment, if there are several.
    fragments: parts of the model that take turns, so that the link is used evenly. Each part is
    exchanged every `every` steps.
    offload: keep the shared weights and the outer momentum in the host's memory, pinned beside
    CUDA. They are copied beside training and exchanges, a bundle at a time. The bits are the same.
    group: the ranks, as a process group or a virtual worker's group.
    replicate_group: this rank's counterparts in other islands, for a model that `fully_shard` or
    DistributedDataParallel trains inside an island:

        fully_shard(model, mesh=mesh["shard"])
        local = gradwire.local_steps(model, optimizer, recipe="muon",
                                     replicate_group=mesh["replicate"].get_group())

    Each rank exchanges its own part of the model with its counterparts, and the memory is for its
    part. The first island's weights are sent to the others.

    fields: fields of Config. Without a recipe the defaults are method "chunked", density 0.05,
    values "int4" and indices "packed".
    """
    # Loaded only here, as the other modules of this folder.
    from gradwire.integrate.local_steps.arguments import read_arguments, warn_without_muon
    from gradwire.integrate.local_steps.handle import LocalSteps
    from gradwire.integrate.local_steps.parts import Parts

    note_torch()
    if replicate_group is not None and group is not None:
        raise ConfigError("local_steps got group and replicate_group: replicate_group is enough")
    optimizers = refuse_for_local_steps(model, optimizer, replicate_group is not None)
    named = {
        "every": every,
        "recipe": recipe,
        "outer": outer,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "keep_unsent": keep_unsent,
        "overlap": overlap,
        "fragments": fragments,
        "offload": offload,
    }
    given = {name: value for name, value in named.items() if value is not None} | fields
    arguments = read_arguments(config, given)
    if recipe:
        warn_without_muon(recipe, optimizers)
    parts = Parts(model)
    if replicate_group is not None:
        # torch takes seconds to import FSDP2, so only islands load these.
        from gradwire.integrate.local_steps.islands import open_island, replicas_of

        group = replicas_of(replicate_group)
        parts = open_island(model, group, timedelta(seconds=arguments.config.timeout))
    local = LocalSteps(parts, optimizers, arguments, group=group)
    if recipe and local.group.rank == 0 and local.parts.place == 0:
        print(f"gradwire: {arguments}", file=sys.stderr)
    return local
