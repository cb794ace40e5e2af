"""ShardedEngine: run a State's steps inside FSDP2's backward pass, one flat shard at a time.

The hook averages a unit's flat shard over the replicas. Autograd's callback at the end of the
backward pass makes all shards of a replica agree if the step was finite.
"""

import contextlib
import logging
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gradwire.accumulate import Bundle
from gradwire.errors import AttachError, ConfigError, DriftError, ExchangeError
from gradwire.integrate.attached import closed_error, live_state
from gradwire.integrate.fsdp.units import Unit
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.together import raise_together
from gradwire.torch_internals import (
    copy_each,
    execution_engine,
    graph_task,
    is_inside_backward,
    shard,
)

if TYPE_CHECKING:
    from gradwire.integrate.fsdp import ShardedWire

log = logging.getLogger("gradwire")


class ShardedEngine:
    """The exchange of one State under FSDP2: a flat shard becomes its mean over the replicas.

    With NCCL, FSDP2 calls the hook on a side stream, and everything is enqueued on that stream. No
    thread is needed, and the host never waits. Gloo blocks, as Gloo's dense all-reduce does.

    shard_ranks: the ranks that hold the shards of one replica.
    """

    def __init__(
        self,
        wire: "ShardedWire",
        root: FSDPModule,
        units: Sequence[Unit],
        shard_ranks: DistributedGroup,
    ) -> None:
        self._owner = weakref.ref(wire)
        self._root = root
        self._units = units
        self.shard_ranks = shard_ranks
        self.broken: Exception | None = None
        """The error that ended the exchange."""
        self._stream: torch.cuda.Stream | None = None
        self._fired: dict[int, int] = {}
        """By unit of this backward pass, the autograd task in which FSDP2 called the hook."""
        self.processed: dict[int, list[Bundle]] = {}
        """By unit that delivered in the last step, the bundles."""
        self.begun = False
        """True: the next flat shard belongs to a step that has begun."""

    @property
    def _wire(self) -> "ShardedWire":
        return live_state(self._owner)

    def close(self) -> None:
        """End the exchange."""
        self.broken = self.broken or closed_error()

    def hook(self, unit: Unit, flat: Tensor) -> None:
        """Replace a flat shard by its mean; called by FSDP2, in the same order on every rank."""
        if self.broken is not None:
            raise self.broken
        try:
            self._average(unit, flat)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C
                self._stop_inside(type(error).__name__)
            raise

    def _stop_inside(self, why: str) -> None:
        """End the exchange in the middle of a backward pass, and release the other ranks at once.

        why: the reason that the other ranks are told.
        """
        self.broken = ExchangeError(f"rank {self._wire.group.rank} has stopped: {why}")
        for group in (self._wire.group, self.shard_ranks):
            group.give_up(why)

    @torch.no_grad()
    def _average(self, unit: Unit, flat: Tensor) -> None:
        """Replace a flat shard by its mean."""
        try:
            parts = unit.split(flat)
            self._enter_unit(unit)
        except (AttachError, ExchangeError) as error:
            self._give_up(error)
            raise
        bundles = self._wire.by_unit.get(unit.index, [])
        if unit.more_to_come:
            self._add_microbatch(unit, bundles, parts)
            # The residual has the gradient now, and delivers it with the last micro-batch.
            flat.zero_()
            return
        done = self.processed.setdefault(unit.index, [])
        for bundle in bundles:
            gradients = [parts[slot.name] for slot in bundle.slots]
            try:
                update = self._exchange(bundle, gradients)
            except Exception as error:
                self._fail(bundle, error)
            copy_each(gradients, [update[s.offset : s.offset + s.numel] for s in bundle.slots])
            done.append(bundle)

    def _add_microbatch(
        self, unit: Unit, bundles: Sequence[Bundle], parts: dict[str, Tensor]
    ) -> None:
        config = self._wire.config
        if config.momentum or config.clip:
            raise ConfigError(
                f"{unit.name or 'the root'}: with momentum or clip micro-batches must be added up "
                f"before the hook: use set_requires_gradient_sync(False) until the last one"
            )
        for bundle in bundles:
            self._wire.add_microbatch(bundle, [parts[slot.name] for slot in bundle.slots])
        self._wire.unsent_units.add(unit.index)

    def _exchange(self, bundle: Bundle, gradients: Sequence[Tensor]) -> Tensor:
        wire = self._wire
        wire.agree("exchange", bundle)
        return wire.process(bundle, gradients)

    # --- the beginning and the end of a step ----------------------------------------------------

    def _enter_unit(self, unit: Unit) -> None:
        """Note that a unit's flat shard is here, and begin a step if it is the first of a step."""
        task = graph_task()
        if self._fired.get(unit.index) == task:
            raise AttachError(
                f"{unit.name or 'the root'} was reduced twice in one backward pass: a module that "
                f"is called again, or a chunked loss, is not supported"
            )
        if unit.index in self._fired:
            warnings.warn("the last backward pass did not finish; it is put back", stacklevel=2)
            self._fired.clear()
            self._settle_others()
            self._wire.mark_last_skipped()
            self.begun = False
        if not self.begun:
            self._begin_step()
        self._fired[unit.index] = task
        if self.shard_ranks.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.shard_ranks.device)
        execution_engine().queue_callback(self._end_backward)

    def _begin_step(self) -> None:
        wire = self._wire
        if wire.watch is not None and wire.watch.due(wire.steps):
            self._check_drift()
        self.processed = {}
        wire.begin()
        wire.agree_on_step(self.shard_ranks)
        self.begun = True

    def _settle_others(self) -> None:
        """Settle the bundles that this step did not use.

        Their last delivery was in an earlier step, and the fate of that step is known by now.
        """
        done = {bundle.index for bundle in self._delivered()}
        for bundle in self._wire.bundles:
            if bundle.index not in done:
                bundle.settle(self._wire.last_skipped)

    def _delivered(self) -> list[Bundle]:
        return [bundle for bundles in self.processed.values() for bundle in bundles]

    def _check_drift(self) -> None:
        error: DriftError | None = None
        try:
            self._wire.check_drift()
        except DriftError as drift:
            error = drift
        raise_together(
            self.shard_ranks,
            error,
            DriftError,
            who=f"shard {{rank}} of {self.shard_ranks.size} failed",
        )

    def _end_backward(self) -> None:
        """End the step, unless the backward pass that ends is inside another one.

        FSDP2 keeps a mark until the outer pass ends.
        """
        if not self._fired or is_inside_backward(self._root):
            return
        units = [self._units[index] for index in self._fired]
        self._fired.clear()
        if any(not unit.more_to_come for unit in units):
            self.begun = False
            self._agree(units)

    @torch.no_grad()
    def _agree(self, units: Sequence[Unit]) -> None:
        """Make all shards skip the step if one shard was not finite; a small all-reduce per step.

        The gradients of every shard are then made to show a NaN.
        """
        device = self.shard_ranks.device
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            self._settle_others()
            failures = torch.zeros(1, dtype=torch.float32, device=device)
            for bundle in self._delivered():
                assert bundle.pending is not None, "a bundle was processed without delivering"
                failures += ~bundle.pending.ok
            ok = self.shard_ranks.all_reduce(failures)[0] == 0
        if self._stream is not None:
            torch.cuda.current_stream(device).wait_stream(self._stream)
        for bundle in self._delivered():
            assert bundle.pending is not None
            bundle.pending.ok = ok
        _mark_gradients(units, ok)

    def _fail(self, bundle: Bundle, error: Exception) -> NoReturn:
        """End the exchange with an error that names rank, step and bundle."""
        broken = ExchangeError(
            f"rank {self._wire.group.rank}, step {self._wire.steps}, bundle {bundle.index} "
            f"({bundle.slots[0].name} ...): {error}"
        )
        log.error("%s", broken, exc_info=error)
        self._give_up(broken)
        raise broken from error

    def _give_up(self, error: Exception) -> None:
        """End the exchange, and release the other ranks, which would wait for ever."""
        self.broken = error
        self._wire.group.give_up()
        self.shard_ranks.give_up()


def _mark_gradients(units: Sequence[Unit], ok: Tensor) -> None:
    """Make the smallest gradient of this rank NaN unless `ok`, so that any check sees it."""
    for unit in units:
        gradient = shard(unit.smallest.parameter).grad if unit.smallest else None
        if gradient is not None:
            local = gradient.to_local()
            local.copy_(torch.where(ok.to(local.device), local, float("nan")))
            return
