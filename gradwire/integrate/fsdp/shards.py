"""Runs a State's steps inside FSDP2's backward pass, one flat shard at a time."""

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
from gradwire.integrate.attached import alive
from gradwire.integrate.fsdp.units import Unit
from gradwire.ranks.group import DistributedGroup
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


class Shards:
    """Flat shards in, their mean over the replicas out, in place.

    NCCL: FSDP2 calls the hook on a stream of its own, beside the backward pass, and everything is
    enqueued there: no thread, no host sync. Gloo blocks, as its dense all-reduce does.
    """

    def __init__(
        self, wire: "ShardedWire", root: FSDPModule, units: Sequence[Unit], shards: DistributedGroup
    ) -> None:
        self._owner = weakref.ref(wire)
        self._root = root
        self._units = units
        self.shards = shards
        self.broken: Exception | None = None
        """The error that ended the exchange."""
        self._stream: torch.cuda.Stream | None = None
        self._fired: dict[int, int] = {}
        """The units of this backward pass, and the autograd task in which each was handed over."""
        self.processed: dict[int, list[Bundle]] = {}
        """The units of the last step that delivered, and their bundles."""
        self.begun = False
        """Whether the step that the next shard belongs to has begun."""

    @property
    def _wire(self) -> "ShardedWire":
        return alive(self._owner)

    def close(self) -> None:
        """Afterwards nothing is exchanged any more."""
        self.broken = self.broken or ExchangeError(
            "the wire was closed: to go on with plain all-reduce call wire.detach() instead"
        )

    @torch.no_grad()
    def hook(self, unit: Unit, flat: Tensor) -> None:
        """Replace a flat shard by its mean; called by FSDP2, in the same order on every rank."""
        if self.broken is not None:
            raise self.broken
        try:
            parts = unit.parts(flat)
            self._enter(unit)
        except (AttachError, ExchangeError) as error:
            self._give_up(error)
            raise
        bundles = self._wire.by_unit.get(unit.index, [])
        if unit.holds:
            self._hold(unit, bundles, parts)
            flat.zero_()
            return
        done = self.processed.setdefault(unit.index, [])
        for bundle in bundles:
            gradients = [parts[slot.name] for slot in bundle.slots]
            try:
                update = self._exchange(bundle, gradients)
            except Exception as error:
                self._fail(bundle, error)
            places = [update[s.offset : s.offset + s.numel] for s in bundle.slots]
            copy_each(gradients, places)
            done.append(bundle)

    def _hold(self, unit: Unit, bundles: Sequence[Bundle], parts: dict[str, Tensor]) -> None:
        config = self._wire.config
        if config.momentum or config.clip:
            raise ConfigError(
                f"{unit.name or 'the root'}: with momentum or clip micro-batches must be added up "
                f"before the hook: use set_requires_gradient_sync(False) until the last one"
            )
        for bundle in bundles:
            self._wire.add_microbatch(bundle, [parts[slot.name] for slot in bundle.slots])
        self._wire.unsent.add(unit.index)

    def _exchange(self, bundle: Bundle, gradients: Sequence[Tensor]) -> Tensor:
        wire = self._wire
        wire.agree("exchange", bundle)
        return wire.process(bundle, gradients)

    # --- where a step begins and ends -----------------------------------------------------------

    def _enter(self, unit: Unit) -> None:
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
            self._wire.put_back()
            self.begun = False
        if not self.begun:
            self._begin()
        self._fired[unit.index] = task
        if self.shards.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.shards.device)
        execution_engine().queue_callback(self._leave)

    def _begin(self) -> None:
        wire = self._wire
        if wire.watch is not None and wire.watch.due(wire.steps):
            self._check_drift()
        self.processed = {}
        wire.begin()
        wire.agree_on_step(self.shards)
        self.begun = True

    def _settle_others(self) -> None:
        """What took no part in this step has delivered in the one before, whose end is known."""
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
            self.shards, error, DriftError, who=f"shard {{rank}} of {self.shards.size} failed"
        )

    def _leave(self) -> None:
        """A backward pass ends; it may be one inside another, which FSDP2's own mark tells."""
        if not self._fired or is_inside_backward(self._root):
            return
        units = [self._units[index] for index in self._fired]
        self._fired.clear()
        if any(not unit.holds for unit in units):
            self.begun = False
            self._agree(units)

    @torch.no_grad()
    def _agree(self, units: Sequence[Unit]) -> None:
        """A shard that was not finite makes the step one that did not happen on all of them.

        Their gradients are then made to show it. A small all-reduce, once a step.
        """
        device = self.shards.device
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            self._settle_others()
            bad = torch.zeros(1, dtype=torch.float32, device=device)
            for bundle in self._delivered():
                assert bundle.pending is not None, "a bundle was processed without delivering"
                bad += ~bundle.pending.ok
            ok = self.shards.all_reduce(bad)[0] == 0
        if self._stream is not None:
            torch.cuda.current_stream(device).wait_stream(self._stream)
        for bundle in self._delivered():
            assert bundle.pending is not None
            bundle.pending.ok = ok
        _mark(units, ok)

    def _fail(self, bundle: Bundle, error: Exception) -> NoReturn:
        """Say where it happened."""
        broken = ExchangeError(
            f"rank {self._wire.group.rank}, step {self._wire.steps}, bundle {bundle.index} "
            f"({bundle.slots[0].name} ...): {error}"
        )
        log.error("%s", broken, exc_info=error)
        self._give_up(broken)
        raise broken from error

    def _give_up(self, error: Exception) -> None:
        """Nobody may wait for ever: release the peers, and end here."""
        self.broken = error
        self._wire.group.give_up()
        self.shards.give_up()


def _mark(units: Sequence[Unit], ok: Tensor) -> None:
    """Make a small gradient of this rank NaN unless `ok`, so that any check sees the step."""
    for unit in units:
        gradient = shard(unit.smallest.parameter).grad if unit.smallest else None
        if gradient is not None:
            local = gradient.to_local()
            local.copy_(torch.where(ok.to(local.device), local, float("nan")))
            return
