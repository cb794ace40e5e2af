"""Everything one rank remembers, and its side of every step."""

import logging
import weakref
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire import path
from gradwire.accumulate import Bundle, arrange
from gradwire.accumulate.delivery import Pending
from gradwire.accumulate.layout import bundle_bytes, is_dense
from gradwire.accumulate.lr import LrTracker
from gradwire.accumulate.step_status import StepStatus
from gradwire.config import Config, configure
from gradwire.errors import GradwireError, StateError, unknown
from gradwire.integrate.versions import note_torch
from gradwire.kernels.scan import Piece
from gradwire.kernels.side_stream import Target, keep_for_stream
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.group import Group, uncounted
from gradwire.stages import Clock, stage, timed_by
from gradwire.state.ahead import PATIENCE, KernelsAhead, compile_ahead
from gradwire.state.choice import Choice, choose, prepare
from gradwire.state.drift import Watch
from gradwire.state.names import parameter_names
from gradwire.state.saved import plain
from gradwire.state.stats import Growth, Stats, stats_of
from gradwire.types import Slot

if TYPE_CHECKING:
    from gradwire.plan.auto import Auto

log = logging.getLogger("gradwire")


class Runner(Protocol):
    """Runner of a State's steps inside a backward pass: DDP's engine, or FSDP2's shards."""

    broken: Exception | None
    """The error that ended the exchange. Autograd passes on its words, but not its kind."""

    def close(self) -> None: ...


class State:
    """One rank's residuals, memories, counters and schedule, keyed by parameter name.

    `attach` makes one. For `ddp.register_comm_hook(State(density=0.01), ddp_hook)` users make it;
    then `model` gives the parameters their names. Without `model` they are numbered on arrival.
    """

    sharded = False
    """True: the model's parameters are spread over ranks."""
    averaged: tuple[str, ...] = ("residual", "velocity")
    """Entries of the saved state whose mean every rank of a resized run gets."""

    # Set by `open`, once the parameters and the other ranks are known.
    group: Group
    device: torch.device
    slots: list[Slot]
    clock: Clock

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
        if type(self) is State:
            # The functions that make other handles look at torch themselves.
            note_torch()
        self.config = configure(config, fields)
        self.model_names = None if model is None else parameter_names(model)
        self.watch = Watch(model, self.config.watch) if self.config.watch else None
        self.process_group = process_group
        self.status = StepStatus(scaler, optimizer)
        self.lr = LrTracker()
        self.engine: Runner | None = None
        self._ahead: KernelsAhead | None = None
        """The wait for kernels that are being compiled; None if none are."""
        self.auto: Auto | None = None
        """Measures steps until the config is chosen; None when it is."""
        self.identity = ""
        """This wire's name on all ranks and in checkpoints; the first save or load sets it."""
        self.stopped = False
        self.reason = ""
        """The reason for which `method="auto"` chose this config."""
        self.bundles: list[Bundle] = []
        self.steps = 0
        self._counts: Counter[str] = Counter()
        self._growth = Growth()
        self._flush = self._flushing = False
        self._is_new = False
        """True: the bundles were made since the last step, perhaps on another stream."""
        self._choices: dict[int, Choice] = {}
        """By bundle, for the density and flush of `_choices_for`."""
        self._choices_for: tuple[float, bool] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the parts of a copy: a State that `ddp_hook` uses is copied with its model.

        The copied model has no hook, and its State begins anew with the same config.
        """
        if type(self) is not State:
            return super().__reduce_ex__(protocol)
        log.info("the copy of a State begins anew: the residual stays with the original")
        return State, (self.config,)

    # --- set-up -------------------------------------------------------------------------------

    def open(self, slots: Sequence[Slot], device: torch.device, group: Group) -> None:
        """Cut the parameters into bundles and allocate their residuals."""
        self.group = group
        self.device = device
        self.slots = list(slots)
        self._order = _digest_of_order(slots)
        self.clock = Clock(device)
        self.status.open(device)
        try:
            self.rebundle(self._cut())
            prepare(self.bundles, self.config, group)
        except GradwireError:
            self._give_back()
            raise
        if isinstance(group, DistributedGroup):
            weakref.finalize(self, _end_dropped, self.engine, group)
            self._compile_ahead()
        log.info("%r", self)

    def _compile_ahead(self) -> None:
        self._stop_waiting()
        self._ahead = compile_ahead(self.config, self.bundles, self.group.size, self.device)

    def wait_for_kernels(self, seconds: float = PATIENCE) -> bool:
        """Wait until the kernels of this wire are compiled; return False if that takes longer.

        Steps need not wait: until then torch's operations do the same, more slowly. A measurement
        should wait. Without a GPU there is nothing to wait for.
        """
        return self._ahead is None or self._ahead.done.wait(seconds)

    def _stop_waiting(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

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
                decay=self.config.decay,
            )
            for i, slots in enumerate(bundles)
        ]
        self._homes = {s.name: (b, s) for b in self.bundles for s in b.slots}
        self._is_new = True
        self._choices_for = None

    @torch.no_grad()
    def settle_auto(self) -> None:
        """Take the config that `auto` chooses. Called between `begin` and the first bundle."""
        assert self.auto is not None, "method='auto' was not asked for"
        fields, self.reason = self.auto.decide(self)
        self.auto = None
        self.switch(configure(self.config, fields))
        log.info("auto: %s", self.reason)

    def switch(self, config: Config) -> None:
        """Go on with another config; residuals and momentum stay.

        Called on every rank, between `begin` and the first bundle of a step.
        """
        old = self.bundles
        for bundle in old:
            bundle.settle(self.status.skipped)
            bundle.fold_owned(self.status.skipped)
            self._counts["clipped"] += int(bundle.tally.clipped)
            self._counts["sent"] += int(bundle.tally.sent)
            self._counts["length_exchanges"] += bundle.tally.length_exchanges
        self.config = config
        self.rebundle(self._cut())
        for bundle in old:
            for slot in bundle.slots:
                new, place = self.home(slot.name)
                new.view(new.buffer, place).copy_(bundle.view(bundle.buffer, slot))
                if bundle.velocity is not None and new.velocity is not None:
                    new.view(new.velocity, place).copy_(bundle.view(bundle.velocity, slot))
        prepare(self.bundles, config, self.group)
        if isinstance(self.group, DistributedGroup):
            self._compile_ahead()

    def reorder(self, name: str, stride: tuple[int, ...]) -> None:
        """Keep a parameter's residual with other strides. Called before its bundle's step."""
        bundle, old = self.home(name)
        new = replace(old, stride=stride)
        bundle.settle(self.status.skipped)
        # Blocks of entries have owners, and an entry may come into a block of another owner.
        bundle.fold_owned(self.status.skipped)
        bundle.reorder(old, new)
        self._homes[name] = bundle, new
        self.slots = [replace(s, stride=stride) if s.name == name else s for s in self.slots]
        self._order = _digest_of_order(self.slots)
        log.info("%s: DDP's bucket has it with strides %s, no longer %s", name, stride, old.stride)

    @property
    def scaler(self) -> Any:
        return self.status.scaler

    @property
    def opened(self) -> bool:
        return bool(self.bundles)

    @property
    def memory_bytes(self) -> int:
        return sum(bundle.nbytes for bundle in self.bundles)

    def __repr__(self) -> str:
        c = self.config
        words = f"{c.method}/{c.exchange}, density {c.density:g}"
        if c.momentum:
            words += f", momentum {c.momentum:g}"
        if c.decay != 1:
            words += f", residuals times {c.decay:g} a step"
        if not self.opened:
            return f"{type(self).__name__}({words}, before its first step)"
        entries = sum(b.entries for b in self.bundles)
        return (
            f"{type(self).__name__}({words}, {entries:,} entries in {len(self.bundles)} bundles, "
            f"{self.memory_bytes / 1e6:.1f} MB of residuals, rank {self.group.rank} of "
            f"{self.group.size})"
        )

    # --- a step -------------------------------------------------------------------------------

    def check_drift(self) -> None:
        """Raise DriftError if a comparison is due and replicas differ. Called before `begin`."""
        if self.watch is not None and self.watch.due(self.steps):
            self.watch.check(self.group, self.device, self.steps)

    def begin(self) -> None:
        """Begin a step: learn if the optimiser took the last one, and count what it sent."""
        if self._is_new:
            keep_for_stream([self.bundles, self.status.scale], self.device)
            self._is_new = False
        self.status.begin(self._pending())
        if (factor := self.lr.take_factor()) != 1:
            for bundle in self.bundles:
                bundle.reweigh(factor, self.status.skipped)
        self._flushing, self._flush = self._flush, False
        for bundle in self.bundles:
            bundle.tally.add_up()
        self.clock.begin_step(self.steps)
        self.steps += 1

    def choose(self, bundle: Bundle) -> Choice:
        """Return what this bundle does in this step; made anew when density or flush changes."""
        step = self.steps - 1
        choices_for = self.config.schedule.density_at(step), self._flushing
        if choices_for != self._choices_for:
            self._choices, self._choices_for = {}, choices_for
        if bundle.index not in self._choices:
            choice = choose(bundle, self.config, step, self.group.size, self._flushing)
            self._choices[bundle.index] = choice
        return self._choices[bundle.index]

    def agree(self, what: str, bundle: Bundle) -> None:
        """Raise on every rank unless all are about to exchange the same, after the same calls.

        Ranks that enqueue collectives on a stream do not ask: the answer would wait for the device.
        """
        if not self.group.on_stream:
            self.group.agree_soon(
                what,
                step=self.steps,
                bundle=bundle.index,
                **self._calls(),
                order=self._order,
                # The last, because a difference above explains a difference here.
                entries=self.choose(bundle).k,
            )

    def agree_on_step(self, group: Group) -> None:
        """Raise on every rank of `group` unless all have come to this step by the same calls."""
        if not group.on_stream and group.size > 1:
            with uncounted(group):
                group.agree("shard exchange", step=self.steps, **self._calls())

    def _calls(self) -> dict[str, float]:
        """Return the effects of `flush`, `detach`, `skip_step` and `follow_lr` on this step."""
        return {
            "flush": int(self._flushing),
            "skipped": int(self.status.skipped),
            "learning_rate": self.lr.rate,
        }

    def home(self, name: str) -> tuple[Bundle, Slot]:
        """Return the bundle and the slot of a parameter."""
        if name not in self._homes:
            raise unknown("parameter", name, self._homes)
        return self._homes[name]

    def process(self, bundle: Bundle, gradients: Sequence[Tensor]) -> Tensor:
        """Return the averaged bundle; `gradients` are its slots' flat gradients, in order."""
        pieces = [(s.offset, g) for s, g in zip(bundle.slots, gradients, strict=True)]
        into = Target(bundle.size, self.device)
        self._average(bundle, pieces, into)
        return into.vector

    def replace(self, bundle: Bundle, pieces: Sequence[Piece], unused: Sequence[Slot] = ()) -> None:
        """Put the averaged bundle in place of its gradient, which arrives in `pieces`."""
        if unused:
            without = {slot.offset for slot in unused if slot.numel}
            pieces = [piece for piece in pieces if piece[0] not in without]
        self._average(bundle, pieces, Target(bundle.size, self.device, pieces), unused)

    @torch.no_grad()
    def _average(
        self, bundle: Bundle, pieces: Sequence[Piece], into: Target, unused: Sequence[Slot] = ()
    ) -> None:
        choice, status = self.choose(bundle), self.status
        with timed_by(self.clock, bundle.index):
            path.average(
                path.Step(
                    bundle, pieces, choice, self.config, self.group, status.skipped, into,
                    status.scale, unused,
                )
            )  # fmt: skip
        self._count(bundle, choice.reason)

    @torch.no_grad()
    def add_microbatch(self, bundle: Bundle, gradients: Sequence[Tensor]) -> None:
        """Take in a micro-batch before the last: its gradient waits in the residual."""
        pieces = [(s.offset, g) for s, g in zip(bundle.slots, gradients, strict=True)]
        unscale = None if self.status.scale is None else self.status.scale.reciprocal()
        with timed_by(self.clock, bundle.index), stage("accumulate"):
            bundle.add_microbatch(pieces, self.status.skipped, unscale)

    def _count(self, bundle: Bundle, reason: str) -> None:
        self._counts["entries"] += bundle.entries
        width = bundle.dtype.itemsize
        ranks = self.group.size
        self._counts["bytes_dense"] += 2 * (ranks - 1) * width * bundle.entries // ranks
        if reason:
            self._counts[f"dense:{reason}"] += 1
            self._counts["sent"] += bundle.entries

    def entries_sent(self) -> int:
        """Return the entries that all bundles have sent so far. Waits for the device."""
        for bundle in self.bundles:
            bundle.tally.add_up()
        return self._counts["sent"] + sum(int(bundle.tally.sent) for bundle in self.bundles)

    def was_skipped(self) -> Tensor:
        """Return True (0-d) if the optimiser passed over the last step; decided on the device."""
        return self.status.last_was_skipped(self._pending())

    def _pending(self) -> list[Pending]:
        return [b.pending for b in self.bundles if b.pending is not None]

    # --- what users call ----------------------------------------------------------------------

    def skip_step(self) -> None:
        """Put back what the last step delivered, because the optimiser did not take it.

        For loops that check gradients themselves. Call it on every rank, after the backward pass
        and before the next one. A GradScaler given as `scaler=` needs no such call.
        """
        if not self._pending():
            raise StateError("skip_step: there is no step to skip, no backward pass has run")
        self.status.by_user = True

    def flush(self) -> None:
        """Send everything that is kept with the next step. Call it on every rank."""
        self._flush = True

    def follow_lr(self, lr: float) -> None:
        """Apply every gradient at the learning rate of its own step; `lr` is the next step's.

            wire.follow_lr(scheduler.get_last_lr()[0])

        Without it a gradient that waits is applied at the rate of the step that sends it. During a
        warm-up that rate is larger than its own. Call it before every backward pass, on every
        rank. From the second call on, residuals are multiplied by the old rate over the new rate.
        """
        self.lr.follow(lr)

    def close(self) -> None:
        """Stop exchanging; call it before the process groups are destroyed."""
        self.stop()
        self.leave()

    def stop(self) -> None:
        """End the thread or hooks that run beside the backward pass."""
        self.stopped = True
        self._stop_waiting()
        if self.engine is not None:
            self.engine.close()
        self.status.close()

    def leave(self) -> None:
        """Give the communicators back. Later questions use the model's own."""
        if self.opened:
            self._give_back()

    def _give_back(self) -> None:
        if isinstance(self.group, DistributedGroup):
            self.group.leave(self.process_group or dist.group.WORLD)

    @torch.no_grad()
    def residual(self, name: str) -> Tensor:
        """Return a copy of this rank's residual of one parameter, in its shape, fp32."""
        self._check_opened("residual")
        bundle, slot = self.home(name)
        kept = bundle.view(bundle.residual(self.was_skipped()), slot)
        return kept * self.lr.factor

    @torch.no_grad()
    def stats(self) -> Stats:
        """Return the numbers so far. Waits for the device."""
        self._check_opened("stats")
        return stats_of(self)

    def _check_opened(self, what: str) -> None:
        if not self.opened:
            raise StateError(f"{what}: there is nothing yet, the parameters are known after a step")

    # --- checkpoint ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part: tensors, numbers and strings, keyed by parameter name."""
        return plain.pack_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, by the same rank of a run of the same size."""
        plain.unpack_state(self, state)

    def check_more(self, saved: Mapping[str, Any]) -> None:
        """Raise StateError for a saved state that is not of gradients."""
        if "local" in saved:
            raise StateError(
                "this state is of local_steps, whose residuals are of weights: load it into the "
                "handle that gradwire.local_steps returns"
            )

    def wait_for_background(self) -> None:
        """Wait until no exchange runs beside the training. Only local steps have such ones."""

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what another number of ranks saved, with the mean of `averaged`."""
        plain.restore(self, saved)


def _end_dropped(engine: Runner | None, group: DistributedGroup) -> None:
    """End a State that was dropped without `close`, or that is there when the process ends."""
    if engine is not None:
        engine.close()
    group.leave(None)


def _digest_of_order(slots: Sequence[Slot]) -> int:
    """Return a digest of all strides: ranks must keep every parameter's entries in one order."""
    return zlib.crc32(repr([slot.stride for slot in slots]).encode())
