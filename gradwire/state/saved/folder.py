"""`gradwire.save` and `gradwire.load`: the checkpoint folder of all ranks."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gradwire.errors import ConfigError, StateError
from gradwire.state.saved.manifest import MANIFEST

if TYPE_CHECKING:
    from gradwire.integrate.fsdp import ShardedWire
    from gradwire.state.state import State

__all__ = ["MANIFEST", "load", "save"]


def save(state: "State", folder: str | os.PathLike[str]) -> None:
    """Write every rank's part and the manifest. A collective call.

    Atomic: until the manifest is replaced, the folder holds the checkpoint that it held before. A
    sharded model's folder is one of torch.distributed.checkpoint, and holds one checkpoint.
    """
    _check_wire(state, "save")
    if not state.opened:
        raise StateError("there is nothing to save yet: the parameters are known after a step")
    path = Path(folder)
    state.wait_for_background()
    if state.sharded:
        from gradwire.state.saved import sharded

        sharded.save(cast("ShardedWire", state), path)
        return
    # Most programs that import gradwire do neither save nor load.
    from gradwire.state.saved.save_parts import save_parts

    save_parts(state, path)


def load(state: "State", folder: str | os.PathLike[str]) -> None:
    """Continue from a folder written by `save`. A collective call.

    Everything is checked before anything is changed. A fault on one rank is an error on every rank.

    The number of ranks may change. Then every rank starts from the mean of the saved residuals and
    of the saved momentum. Nothing is lost, because the mean over the new ranks is the mean over the
    old ones. Replicas of a sharded model may change in number likewise, and so may its shards. With
    local steps the weights are averaged too, and optimiser and buffers are rank 0's.
    """
    _check_wire(state, "load")
    if not state.opened:
        raise StateError("load after attach, or after a step: the parameters are not known yet")
    state.wait_for_background()
    path = Path(folder)
    if state.sharded:
        from gradwire.state.saved import sharded

        sharded.load(cast("ShardedWire", state), path)
        return
    from gradwire.state.saved.load_parts import load_parts

    load_parts(state, path)


def _check_wire(wire: Any, operation: str) -> None:
    if not hasattr(wire, "opened"):
        raise ConfigError(
            f"{operation} takes the wire that attach returned, got {type(wire).__name__}"
        )
