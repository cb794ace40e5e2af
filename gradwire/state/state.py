"""Everything one rank remembers, and its side of every step."""

import logging
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire import path
from gradwire.accumulate import Bundle, arrange
from gradwire.accumulate.layout import bundle_bytes, is_dense
from gradwire.accumulate.lr import Worth
from gradwire.accumulate.step_status import Skips
from gradwire.config import Config, configure
from gradwire.errors import StateError, unknown
from gradwire.kernels.scan import Piece
from gradwire.kernels.streams import keep_for_stream
from gradwire.ranks.group import DistributedGroup, Group
from gradwire.stages import Clock, stage, timed_by
from gradwire.state.choice import Choice, choose, prepare
from gradwire.state.drift import Watch
from gradwire.state.names import parameter_names
from gradwire.state.saved import plain
from gradwire.state.stats import Growth, Stats, stats_of
from gradwire.types import Delivered, Slot

log = logging.getLogger("gradwire")


class State:
    """One rank's residuals, memories, counters and schedule, keyed by parameter name.

    Made by `attach`; or by hand for `ddp.register_comm_hook(State(density=0.01), ddp_hook)`, then
    `model` gives the parameters their names (without it they are numbered as they arrive).
    """

    sharded = False
    """Whether the model's parameters are spread over ranks."""
    averaged: tuple[str, ...] = ("residual", "velocity")
    """Entries of the saved state of which another number of ranks gets the mean."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        scaler: Any = None,
        optimizer: Optimizer | None = None,
        **fields: Any,
    ) -> None:
        self.config = configure(config, fields)
        self.model_names = None if model is None else parameter_names(model)
        self.watch = Watch(model, self.config.watch) if self.config.watch else None
        self.process_group = process_group
        self.skips = Skips(scaler, optimizer)
        self.worth = Worth()
        self.engine: Any = None
        self.auto: Any = None
        """Measures steps until it is decided how to go on; None when that is known."""
        self.identity = ""
        """Of this wire, on all ranks and in its checkpoints; given by the first save or load."""
        self.stopped = False
        self.reason = ""
        """Why `method="auto"` chose this config."""
        self.bundles: list[Bundle] = []
        self.steps = 0
        self._counts: Counter[str] = Counter()
        self._growth = Growth()
        self._flush = self._flushing = False
        self._foreign = False
        """Whether the bundles were made since the last step, perhaps on another stream."""

    # --- set-up -------------------------------------------------------------------------------

    def open(self, slots: Sequence[Slot], device: torch.device, group: Group) -> None:
        """Cut the parameters into bundles and allocate their residuals."""
        self.group = group
        self.device = device
        self.slots = list(slots)
        self._order = _digest_of_order(slots)
        self.clock = Clock(device)
        self.skips.open(device)
        self.rebundle(self._cut())
        prepare(self.bundles, self.config, group)
        log.info("%r", self)

    def _cut(self) -> list[list[Slot]]:
        size = bundle_bytes(self.config.bundle_mb, self.device, sum(s.numel for s in self.slots))
        return arrange(self.slots, size, self.config.dense)

    def rebundle(self, bundles: Sequence[Sequence[Slot]]) -> None:
        self.bundles = [
            Bundle(
                slots,
                self.device,
                rank=self.group.rank,
                index=i,
                dense=is_dense(slots[0].name, self.config.dense),
                ranks=self.group.size,
                correction=self.config.correction,
            )
            for i, slots in enumerate(bundles)
        ]
        self._homes = {s.name: (b, s) for b in self.bundles for s in b.slots}
        self._foreign = True

    @torch.no_grad()
    def settle_auto(self) -> None:
        """Go on as `auto` says, after what it measured. Between `begin` and the first bundle."""
        fields, self.reason = self.auto.decide(self)
        self.auto = None
        self.switch(configure(self.config, fields))
        log.info("auto: %s", self.reason)

    def switch(self, config: Config) -> None:
        """Go on with another config: residuals and momentum stay. Between `begin` and the first
        bundle of a step; on every rank."""
        old = self.bundles
        for bundle in old:
            bundle.settle(self.skips.before)
            self._counts["clipped"] += int(bundle.clipped)
            self._counts["sent"] += int(bundle.sent)
        self.config = config
        self.rebundle(self._cut())
        for bundle in old:
            for slot in bundle.slots:
                new, place = self.home(slot.name)
                new.view(new.buffer, place).copy_(bundle.view(bundle.buffer, slot))
                if bundle.velocity is not None and new.velocity is not None:
                    new.view(new.velocity, place).copy_(bundle.view(bundle.velocity, slot))
        prepare(self.bundles, config, self.group)

    def reorder(self, name: str, stride: tuple[int, ...]) -> None:
        """Keep what waits for a parameter with other strides. Before its bundle's step."""
        bundle, old = self.home(name)
        new = replace(old, stride=stride)
        bundle.settle(self.skips.before)
        bundle.reorder(old, new)
        self._homes[name] = bundle, new
        self.slots = [replace(s, stride=stride) if s.name == name else s for s in self.slots]
        self._order = _digest_of_order(self.slots)
        log.info("%s: DDP's bucket has it with strides %s, no longer %s", name, stride, old.stride)

    @property
    def scaler(self) -> Any:
        return self.skips.scaler

    @property
    def opened(self) -> bool:
        return bool(self.bundles)

    @property
    def memory_bytes(self) -> int:
        return sum(bundle.nbytes for bundle in self.bundles)

    def __repr__(self) -> str:
        c = self.config
        what = f"{c.method}/{c.exchange}, density {c.density:g}"
        if c.momentum:
            what += f", momentum {c.momentum:g}"
        if not self.opened:
            return f"{type(self).__name__}({what}, before its first step)"
        entries = sum(b.entries for b in self.bundles)
        return (
            f"{type(self).__name__}({what}, {entries:,} entries in {len(self.bundles)} bundles, "
            f"{self.memory_bytes / 1e6:.1f} MB of residuals, rank {self.group.rank} of "
            f"{self.group.size})"
        )

    # --- a step -------------------------------------------------------------------------------

    def check_drift(self) -> None:
        """Raises DriftError when it is time to look and replicas differ. Before `begin`."""
        if self.watch is not None and self.watch.due(self.steps):
            self.watch.check(self.group, self.device, self.steps)

    def begin(self) -> None:
        """A backward pass begins: find out what became of the last step."""
        if self._foreign:
            keep_for_stream([self.bundles, self.skips.scale], self.device)
            self._foreign = False
        self.skips.begin(self._delivered())
        if (factor := self.worth.take()) != 1:
            for bundle in self.bundles:
                bundle.reweigh(factor, self.skips.before)
        self._flushing, self._flush = self._flush, False
        for bundle in self.bundles:
            bundle.tally()
        self.clock.begin(self.steps)
        self.steps += 1

    def choose(self, bundle: Bundle) -> Choice:
        """What this bundle does in this step."""
        return choose(bundle, self.config, self.steps - 1, self.group.size, self._flushing)

    def agree(self, what: str, bundle: Bundle) -> None:
        """Raises on every rank unless all are about to exchange the same, after the same calls.

        Where collectives are enqueued on a stream nothing is asked: it would wait for the device.
        """
        if not self.group.on_stream:
            self.group.agree(
                what,
                step=self.steps,
                bundle=bundle.index,
                flush=int(self._flushing),
                skipped=int(self.skips.before),
                learning_rate=self.worth.lr,
                order=self._order,
                # The last: it follows from the others, and they say why.
                entries=self.choose(bundle).k,
            )

    def home(self, name: str) -> tuple[Bundle, Slot]:
        """Where a parameter lives."""
        if name not in self._homes:
            raise unknown("parameter", name, self._homes)
        return self._homes[name]

    def process(self, bundle: Bundle, gradients: Sequence[Tensor]) -> Tensor:
        """The averaged bundle; `gradients` are its slots' flat gradients, in order."""
        pieces = [(s.offset, g) for s, g in zip(bundle.slots, gradients, strict=True)]
        update = self._average(bundle, pieces)
        assert update is not None, "it goes into the pieces where that is allowed"
        return update

    @torch.no_grad()
    def replace(self, bundle: Bundle, pieces: Sequence[Piece], unused: Sequence[Slot] = ()) -> None:
        """The averaged bundle takes the place of its gradient, which arrives in `pieces`."""
        update = self._average(bundle, pieces, unused, in_place=True)
        if update is not None:
            parts = [update[place : place + piece.numel()] for place, piece in pieces]
            # One launch on CUDA, however many pieces there are.
            torch._foreach_copy_([piece for _, piece in pieces], parts)

    @torch.no_grad()
    def _average(
        self,
        bundle: Bundle,
        pieces: Sequence[Piece],
        unused: Sequence[Slot] = (),
        in_place: bool = False,
    ) -> Tensor | None:
        choice = self.choose(bundle)
        if unused:
            without = {slot.offset for slot in unused if slot.numel}
            pieces = [piece for piece in pieces if piece[0] not in without]
        with timed_by(self.clock, bundle.index):
            update = path.average(
                bundle, pieces, choice, self.config, self.group, self.skips.before,
                self.skips.scale, unused, in_place,
            )  # fmt: skip
        self._count(bundle, choice.reason)
        return update

    @torch.no_grad()
    def hold(self, bundle: Bundle, gradients: Sequence[Tensor]) -> None:
        """Take in a micro-batch before the last: its gradient waits in the residual."""
        pieces = [(s.offset, g) for s, g in zip(bundle.slots, gradients, strict=True)]
        unscale = None if self.skips.scale is None else self.skips.scale.reciprocal()
        with timed_by(self.clock, bundle.index), stage("accumulate"):
            bundle.hold(pieces, self.skips.before, unscale)

    def _count(self, bundle: Bundle, reason: str) -> None:
        self._counts["entries"] += bundle.entries
        width = bundle.dtype.itemsize
        ranks = self.group.size
        self._counts["bytes_dense"] += 2 * (ranks - 1) * width * bundle.entries // ranks
        if reason:
            self._counts[f"dense:{reason}"] += 1
            self._counts["sent"] += bundle.entries

    def entries_sent(self) -> int:
        """By all bundles so far. Waits for the device."""
        for bundle in self.bundles:
            bundle.tally()
        return self._counts["sent"] + sum(int(bundle.sent) for bundle in self.bundles)

    def was_skipped(self) -> Tensor:
        """Whether the optimiser passed over the last step (0-d bool), decided on the device."""
        return self.skips.now(self._delivered())

    def _delivered(self) -> list[Delivered]:
        return [b.delivered for b in self.bundles if b.delivered is not None]

    # --- what users call ----------------------------------------------------------------------

    def skip_step(self) -> None:
        """The last step was not taken: put back what it delivered.

        For loops that check gradients themselves. Call it on every rank, after the backward pass
        and before the next one. A GradScaler given as `scaler=` is noticed without it.
        """
        if all(bundle.delivered is None for bundle in self.bundles):
            raise StateError("skip_step: there is no step to skip, no backward pass has run")
        self.skips.by_user = True

    def flush(self) -> None:
        """The next step sends everything that is kept. Call it on every rank."""
        self._flush = True

    def follow_lr(self, lr: float) -> None:
        """The learning rate of the next step: what waits counts with that of its own step.

            wire.follow_lr(scheduler.get_last_lr()[0])

        Without it a gradient that waits is applied at the rate of the step that sends it, in a
        warm-up at a larger one than its own. Call it before every backward pass, on every rank;
        from the second call on residuals are multiplied with the old rate over the new one.
        """
        self.worth.follow(lr)

    def close(self) -> None:
        """Stop exchanging; call it before the process groups are destroyed."""
        self.stop()
        self.leave()

    def stop(self) -> None:
        """End what runs beside the backward pass."""
        self.stopped = True
        if self.engine is not None:
            self.engine.close()
        self.skips.close()

    def leave(self) -> None:
        """Give the communicators back. What is asked later goes over the model's own."""
        if self.opened and isinstance(self.group, DistributedGroup):
            self.group.leave(self.process_group or dist.group.WORLD)

    @torch.no_grad()
    def residual(self, name: str) -> Tensor:
        """A copy of this rank's residual of one parameter, in the parameter's shape, fp32."""
        self._check_opened("residual")
        bundle, slot = self.home(name)
        kept = bundle.view(bundle.residual(self.was_skipped()), slot)
        return kept * self.worth.factor

    @torch.no_grad()
    def stats(self) -> Stats:
        """The numbers so far. Waits for the device."""
        self._check_opened("stats")
        return stats_of(self)

    def _check_opened(self, what: str) -> None:
        if not self.opened:
            raise StateError(f"{what}: there is nothing yet, the parameters are known after a step")

    # --- checkpoint ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: tensors, numbers and strings only, keyed by parameter name."""
        return plain.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, by the same rank of a run of the same size."""
        plain.load_state_dict(self, state)

    def check_more(self, saved: Mapping[str, Any]) -> None:
        """Raises StateError for a state that is not of gradients."""
        if "local" in saved:
            raise StateError(
                "this state is of local_steps, whose residuals are of weights: load it into the "
                "handle that gradwire.local_steps returns"
            )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what all ranks of another number saved, the mean of `averaged`."""
        plain.restore(self, saved)


def _digest_of_order(slots: Sequence[Slot]) -> int:
    """What ranks compare to see that they keep the entries of every parameter in one order."""
    return zlib.crc32(repr([slot.stride for slot in slots]).encode())
