"""LocalSteps: the handle that `local_steps` returns."""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gradwire.accumulate import Bundle
from gradwire.errors import ConfigError, ExchangeError, GradwireError, StateError
from gradwire.integrate.handshake import compare_settings, handshake
from gradwire.integrate.local_steps.flights import Background, Flight
from gradwire.integrate.local_steps.fragments import cut_model, is_turn
from gradwire.integrate.local_steps.parts import Parts
from gradwire.integrate.loop import slots_of
from gradwire.kernels.scan import usable
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.group import Group, uncounted
from gradwire.state.drift import Watch
from gradwire.state.state import State
from gradwire.state.stats import Stats
from gradwire.types import Slot

if TYPE_CHECKING:
    from gradwire.integrate.local_steps.arguments import Arguments
    from gradwire.state.saved.cuts import Cut, MoreSaved

Ranks = dist.ProcessGroup | Group | None


class SharedWatch(Watch):
    """A drift watch that compares x, because only x is equal on all ranks."""

    shared: Mapping[str, Tensor]
    """x of the parameters to compare."""

    def _watched(self) -> dict[str, Tensor]:
        frozen = {n: p for n, p in super()._watched().items() if not p.requires_grad}
        plain = {n: p for n, p in frozen.items() if not hasattr(p, "placements")}
        return {**plain, **self.shared}


class LocalSteps(State):
    """The handle that `local_steps` returns: a State whose gradient is a difference of weights.

    x: the weights that all ranks had after the last exchange. w: this rank's weights now.

        u = x - w + residual,     update = mean over ranks of the sent entries of u
        m = momentum m + update,  x = x - lr (update + momentum m),  w = x

    Without momentum x = x - lr update. x and m are fp32, with the same bits on every rank, and so
    is w. x keeps the digits that bf16 weights cannot hold. If some rank's weights are not finite,
    a round delivers nothing: w = x, and finite differences wait in the residuals.

    With `keep_unsent` w = x - residual. A rank goes on from its own weights in entries that it did
    not send, so its gradients see the updates that other ranks still wait for. With outer lr 1 and
    no momentum, an exchange then leaves the mean of all w unchanged.

    With `decay` the residual is multiplied by it after an exchange, and what that takes away is
    forgotten: sum of x - w + residual = P update + sum of new residuals + sum of old - new.

    With `overlap` n the difference is taken at the end of a round, at inner step t, and the weights
    w(t) are kept. The exchange runs beside the next n steps. At t + n the outer step is taken, and
    the update lands on the weights as they are by then:

        w = x + (w - w(t)),  or with keep_unsent  w = x - residual + (w - w(t))

    So no inner step is lost: those after t count in the next difference. After a round that
    delivered nothing w = x (less the residual), and these n steps are lost with it.

    With `fragments` each part of the model has rounds of its own, `every` steps long, which end one
    after the other. `steps` then counts the exchanges of all parts.

    In islands a rank holds x, m and residual of its part of the model alone, and a rank above is
    an island. The parts of an island skip a round together.

    SparseLoCo (Sarfi et al. 2025) differs in its mean, which is over the ranks that sent an entry;
    here the mean is over all ranks.
    """

    engine: Background
    averaged = ("residual", "velocity", "weights", "departures")

    def __init__(
        self,
        parts: Parts,
        optimizers: Sequence[Optimizer],
        arguments: "Arguments",
        *,
        group: Ranks = None,
    ) -> None:
        super().__init__(arguments.config, model=parts.model)
        self.every, self.keep_unsent = arguments.every, arguments.keep_unsent
        self.overlap, self.fragments = arguments.overlap, arguments.fragments
        self.outer_lr, self.outer_momentum = arguments.rule
        self.parts, self.model, self.optimizers = parts, parts.model, list(optimizers)
        self.sharded = bool(parts.axes)
        self.inner_steps = 0
        """Inner steps so far; `steps` counts the exchanges."""
        self.is_shared = False
        """True inside `shared`: the model holds x, not this rank's weights."""
        self.flights: list[Flight] = []
        """Exchanges whose updates have not landed yet, in the order in which they were taken."""
        self.unflushed: set[int] = set()
        """Fragments that have not been exchanged since `flush`."""
        sizes = parts.sizes()
        if self.fragments > len(sizes):
            raise ConfigError(
                f"fragments={self.fragments}, and the model has {len(sizes)} parameters: use fewer"
            )
        self.fragment_of = cut_model(sizes, self.fragments)
        """The fragment of each parameter."""
        here = parts.read()
        self.reference = {n: torch.empty_like(p, dtype=torch.float32) for n, p in here.items()}
        """x by name, in fp32."""
        self.velocity: dict[str, Tensor] = {}
        """m by name; empty without outer momentum."""
        if self.outer_momentum:
            self.velocity = {name: torch.zeros_like(x) for name, x in self.reference.items()}
        self._join_ranks(group)
        for name, part in parts.read().items():
            self.reference[name].copy_(part)
        if self.config.watch:
            self.watch = SharedWatch(self.model, self.config.watch)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's parameters by name."""
        return self.parts.parameters

    @torch.no_grad()
    def _join_ranks(self, group: Ranks) -> None:
        """Compare settings with the other ranks, and take over rank 0's weights.

        This is a collective call.
        """
        self.engine = Background(self.parts.device)
        slots, settings = self._slots(), self._settings()
        error: GradwireError | None = None
        try:
            if group is None or isinstance(group, dist.ProcessGroup):
                group = handshake(group, self.config, slots, self.parts.device, settings)
            if not any(slot.numel for slot in slots):
                raise ConfigError(
                    f"rank {self.parts.place} of an island of {self.parts.places} holds no entry "
                    f"of the model: use fewer"
                )
            self.engine.group = group
            self.open(slots, self.parts.device, group)
        except GradwireError as failure:
            error = failure
        try:
            self.parts.raise_together(error)
            for axis in self.parts.axes:
                names = [slot.name for slot in slots]
                with uncounted(axis):
                    compare_settings(axis, self.config.asdict() | settings | {"parameters": names})
                weakref.finalize(self, axis.leave, None).atexit = False
        except GradwireError:
            self.parts.leave()
            if error is None:
                self.leave()
            raise
        assert isinstance(group, Group)
        with uncounted(group):
            self.parts.spread(group)

    def _slots(self) -> list[Slot]:
        # Differences of weights are fp32 for every dtype of weights.
        like = {
            name: torch.empty(p.shape, dtype=torch.float32, device="meta")
            for name, p in self.parts.read().items()
        }
        # Bundles never span two units: fragments, and parameters that several ranks hold whole.
        return [
            dataclasses.replace(
                slot, unit=2 * self.fragment_of[slot.name] + (slot.name not in self.parts.whole)
            )
            for slot in slots_of(like)
        ]

    def _settings(self) -> dict[str, object]:
        """Return the settings beside the Config that all ranks must have alike."""
        return {
            "every": self.every,
            "outer": [self.outer_lr, self.outer_momentum],
            "keep_unsent": self.keep_unsent,
            "overlap": self.overlap,
            "fragments": self.fragments,
            "island": [self.parts.kind, self.parts.places],
        }

    def rebundle(self, bundles: Sequence[Sequence[Slot]]) -> None:
        """Make the bundles, without the parameters that this rank has no entry of."""
        filled = [[slot for slot in slots if slot.numel] for slots in bundles]
        # Those that several ranks hold come first, so that their bundles have the same numbers.
        filled.sort(key=lambda slots: slots[0].unit % 2 if slots else 0)
        super().rebundle([slots for slots in filled if slots])

    def bundles_of(self, fragment: int) -> list[Bundle]:
        """Return the bundles of one fragment."""
        return [bundle for bundle in self.bundles if bundle.slots[0].unit // 2 == fragment]

    # --- a round --------------------------------------------------------------------------------

    def step(self) -> None:
        """Count an inner step, and exchange at every `every`-th.

        Call it after every step of the optimiser, also if a GradScaler skipped the step. All ranks
        have to count alike, and the weights of that rank have only moved a little less.
        """
        self.refuse_shared("step")
        self._raise_broken()
        self.inner_steps += 1
        self._land([flight for flight in self.flights if flight.due <= self.inner_steps])
        for number in range(self.fragments):
            if is_turn(number, self.fragments, self.every, self.inner_steps):
                self._take(number, self.overlap)

    def exchange(self) -> None:
        """Exchange now; afterwards all ranks have the same weights, unless `keep_unsent` is set.

        An update that is on its way lands first. This is a collective call.
        """
        self.refuse_shared("exchange")
        self._raise_broken()
        self._land(self.flights)
        for number in range(self.fragments):
            self._take(number, 0)

    @torch.no_grad()
    def _take(self, number: int, overlap: int) -> None:
        """Take the difference of a fragment, and begin its exchange; it lands `overlap` later."""
        # Not `steps`, which the background counts.
        self.parts.agree("local_steps", inner_steps=self.inner_steps)
        self._settle_old()
        names = [name for name, fragment in self.fragment_of.items() if fragment == number]
        now = self.parts.read(names)
        values = {n: self._start_weight(n, w).float() - w.float() for n, w in now.items()}
        flight = Flight(
            number, self.inner_steps, self.inner_steps + overlap, number in self.unflushed, values
        )
        self.unflushed.discard(number)
        if overlap:
            flight.taken = {n: w.clone() for n, w in now.items()}
        self._note_finite(flight)
        self.flights.append(flight)
        # Virtual workers take turns in their exchanges, which a thread would break.
        if overlap and isinstance(self.group, DistributedGroup):
            self.engine.send(flight, self._exchange)
            return
        try:
            self._exchange(flight)
            flight.arrived()
        except BaseException:
            self.flights.remove(flight)
            raise
        if not overlap:
            self._land([flight])

    def _settle_old(self) -> None:
        """Settle what a checkpoint of an older release left open."""
        # The background settles what is its own.
        if not self.flights and self._pending():
            skipped = self.was_skipped()
            self.status.count += skipped
            self._settle(self.bundles, skipped)
            self.status.by_user = False

    def _settle(self, bundles: Sequence[Bundle], skipped: Tensor) -> None:
        for bundle in bundles:
            bundle.settle(skipped)

    def _note_finite(self, flight: Flight) -> None:
        """Let all bundles skip the round if one of them would, on all ranks of the island.

        The bundles of other ranks then skip it too. Else some parameters would move alone.
        """
        bundles = self.bundles_of(flight.number)
        if not self.parts.axes and len(bundles) < 2:
            return
        failed = torch.zeros((), dtype=torch.bool, device=self.device)
        for bundle in bundles:
            for slot in bundle.slots:
                kept = bundle.view(bundle.u, slot)
                failed = failed | ~usable(kept + flight.values[slot.name], kept).all()
        failed = self.parts.any_failed(failed)
        for bundle in bundles:
            bundle.note_finite(~failed)

    def _exchange(self, flight: Flight) -> None:
        """Turn the difference into the update; nothing of the model is touched."""
        try:
            self._average_flight(flight)
        except GradwireError:
            self.parts.give_up()
            raise

    @torch.no_grad()
    def _average_flight(self, flight: Flight) -> None:
        bundles = self.bundles_of(flight.number)
        if not self.group.on_stream:
            # Everything that ranks could have called alone, as nothing has changed yet.
            self.group.agree(
                "local_steps",
                steps=self.steps,
                inner_steps=flight.taken_at,
                flush=int(flight.flushes),
                learning_rate=self.lr.rate,
            )
        if isinstance(self.watch, SharedWatch) and self.watch.due(self.steps // self.fragments):
            # Other fragments may land meanwhile.
            self.watch.shared = {name: self.reference[name] for name in flight.values}
            self.watch.check(self.group, self.device, self.steps)
        self._flush = flight.flushes
        self.begin()
        for bundle in bundles:
            with uncounted(self.group):
                self.agree("average", bundle)
            gradients = [flight.values[slot.name].reshape(-1) for slot in bundle.slots]
            update = self.process(bundle, gradients)
            for slot in bundle.slots:
                part = update[slot.offset : slot.offset + slot.numel]
                flight.values[slot.name] = part.view(slot.shape)
        skipped = self.was_skipped()
        self._settle(bundles, skipped)
        self.status.count += skipped
        flight.ok = ~skipped
        for name, update in flight.values.items():
            # Otherwise NaN, or the difference of a part without entries.
            flight.values[name] = torch.where(skipped, 0, update)

    @torch.no_grad()
    def _land(self, flights: Sequence[Flight]) -> None:
        """Apply updates that have arrived to x, m and w."""
        for flight in list(flights):
            self._wait(flight)
            self.flights.remove(flight)
            assert flight.ok is not None
            skipped = ~flight.ok
            now = self.parts.read(flight.values)
            ends: dict[str, Tensor] = {}
            for name, weight in now.items():
                self._outer_step(name, flight.values.pop(name), skipped)
                ends[name] = start = self._start_weight(name, weight)
                if flight.taken:
                    moved = start.float() + (weight.float() - flight.taken.pop(name).float())
                    ends[name] = torch.where(skipped, start, moved.to(start.dtype))
                if not self.parts.puts_together:
                    self.parts.put(ends)
                    ends = {}
            self.parts.put(ends)
            self.parts.refresh()

    def _start_weight(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight with which a round begins, in the dtype of `weight`."""
        start = self.reference[name]
        if self.keep_unsent and start.numel():
            bundle, slot = self.home(name)
            start = start - bundle.view(bundle.u, slot)
        return start.to(weight.dtype)

    def _outer_step(self, name: str, update: Tensor, skipped: Tensor) -> None:
        """Take the outer step of one parameter: change m and x in place."""
        if self.velocity:
            velocity = self.velocity[name]
            new_velocity = self.outer_momentum * velocity + update
            update = torch.where(skipped, 0, update + self.outer_momentum * new_velocity)
            velocity.copy_(torch.where(skipped, velocity, new_velocity))
        self.reference[name].sub_(update, alpha=self.outer_lr)

    def _wait(self, flight: Flight) -> None:
        """Wait for the end of an exchange; an interrupt ends it on all ranks."""
        try:
            self.engine.wait(flight)
        except Exception:
            raise
        except BaseException as error:  # Ctrl-C
            self.engine.broken = ExchangeError(f"rank {self.group.rank} has stopped")
            self.group.give_up(type(error).__name__)
            self.parts.give_up()
            raise

    def wait_for_background(self) -> None:
        """Wait until no exchange runs; updates that have arrived stay on their way."""
        for flight in self.flights:
            self._wait(flight)

    def _raise_broken(self) -> None:
        if self.engine.broken is not None:
            raise self.engine.broken

    # --- what users call ------------------------------------------------------------------------

    def flush(self) -> None:
        """Send everything that is kept with the next exchange, of every fragment."""
        self.unflushed = set(range(self.fragments))

    def shared_weights(self) -> dict[str, Tensor]:
        """Return copies of x in fp32: the weights that all ranks had after the last exchange.

        In an island they are whole with DDP, and DTensors with FSDP2; all its ranks call it.
        """
        return self.parts.join({name: x.clone() for name, x in self.reference.items()})

    def shared(self) -> AbstractContextManager[None]:
        """Put x into the model while the block runs, to evaluate or export it.

            with local.shared():
                evaluate(model)

        Afterwards the rank has its own weights and buffers again, bit by bit, also if the block
        failed. Buffers stay the rank's own. What is trained inside is lost. It takes a copy of the
        model. Each rank may call it alone; in an island, all its ranks together.
        """
        from gradwire.integrate.local_steps.shared import shared

        return shared(self)

    def skip_step(self) -> None:
        """Raise StateError, because the weights have moved already."""
        raise StateError("skip_step: an exchange of weights cannot be taken back")

    def follow_lr(self, lr: float) -> None:
        """Weigh residuals by learning rates, as `State.follow_lr`; not with overlap or fragments.

        Fragments are exchanged at steps of their own, and a residual on its way has no rate.
        """
        if self.overlap or self.fragments > 1:
            raise StateError("follow_lr does not go together with overlap or fragments")
        super().follow_lr(lr)

    def stop(self) -> None:
        """Wait for an exchange in the background, and end it; an update on its way is dropped."""
        super().stop()
        self.flights.clear()

    def residual(self, name: str) -> Tensor:
        """Return a copy of this rank's residual of its part of one parameter, fp32."""
        self.wait_for_background()
        part = self.reference.get(name)
        if part is not None and not part.numel():
            # An empty part is in no bundle.
            return torch.zeros_like(part)
        return super().residual(name)

    def memory_use(self) -> dict[str, int]:
        """Return the bytes that this rank holds beside weights and optimiser, by their use.

        The last two are those of an exchange at its peak, and of the largest fragment.
        """
        from gradwire.integrate.local_steps.memory import memory_use

        return memory_use(self)

    def __repr__(self) -> str:
        from gradwire.integrate.local_steps.memory import describe_memory

        return f"{super().__repr__()[:-1]}, {describe_memory(self)})"

    @property
    def bytes_inside(self) -> int:
        """The bytes that local steps have sent between the ranks of this rank's island."""
        return sum(axis.bytes_sent for axis in self.parts.axes)

    def stats(self) -> Stats:
        """Return `Stats`, in which bytes_dense counts a dense all-reduce after every inner step.

        In islands all numbers are of this rank's part and of what it sends to other islands.
        """
        self.wait_for_background()
        ranks, width = self.group.size, sum(p.nbytes for p in self.parts.read().values())
        dense = self.inner_steps * (2 * (ranks - 1) * width // ranks)
        return dataclasses.replace(super().stats(), bytes_dense=dense)

    def leave(self) -> None:
        super().leave()
        self.parts.leave()

    # --- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return State's part, and this rank's weights, buffers and optimisers.

        Between exchanges these differ from rank to rank, so rank 0's model alone is not enough.
        An exchange in the background is waited for; its update is saved beside, and lands later.
        """
        from gradwire.integrate.local_steps.saved import pack

        self.refuse_shared("state_dict")
        self.wait_for_background()
        self._flush = bool(self.unflushed)
        if self.parts.axes:
            from gradwire.state.saved import sharded

            return sharded.state_dict(self)
        return super().state_dict() | pack(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, by the same rank of a run of the same size."""
        if not self.parts.axes:
            return super().load_state_dict(state)
        from gradwire.state.saved import sharded

        sharded.load_state_dict(self, state)

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a checked state, weights and optimisers included."""
        from gradwire.integrate.local_steps.saved import load

        self.wait_for_background()
        super().restore(saved)
        load(self, saved)
        waiting = range(self.fragments) if self._flush else ()
        self.unflushed = set(saved["local"].get("unflushed", waiting))

    def check_more(self, saved: Mapping[str, Any]) -> None:
        """Raise StateError unless weights, buffers, optimisers and rule fit this model."""
        from gradwire.integrate.local_steps.saved import check

        self.refuse_shared("load")
        check(self, saved)

    # --- islands' checkpoints, in the format of sharded models -----------------------------------

    @property
    def shard(self) -> int:
        """The number of this rank in its island."""
        return self.parts.place

    @property
    def shards(self) -> int:
        """The number of ranks in the island."""
        return self.parts.places

    @property
    def inner_groups(self) -> Sequence[Group]:
        """The groups that together reach every rank of the island."""
        return self.parts.axes

    def cuts(self) -> "dict[str, Cut]":
        """Return by name the way in which the island cuts each parameter."""
        return self.parts.cuts()

    def more_saved(self) -> "MoreSaved":
        """Return what an island saves beside residuals."""
        from gradwire.integrate.local_steps.saved_islands import more_saved

        return more_saved(self)

    @property
    def has_whole_moments(self) -> bool:
        """True: every rank of an island has the whole moments of its optimiser."""
        return self.parts.kind == "ddp"

    def check_kind(self, header: Mapping[str, Any]) -> None:
        """Raise StateError for a folder of islands of another kind."""
        kind = header["local"].get("island") if isinstance(header.get("local"), dict) else None
        if kind is not None and kind != self.parts.kind:
            raise StateError(
                f"the state is of islands of {kind!r:.20}, these are of {self.parts.kind!r}: wrap "
                f"the model as then"
            )

    def adopt_vectors(self, saved: dict[str, Any], part: Mapping[str, Any]) -> None:
        """Put the vectors of a folder in their places in `saved`."""
        from gradwire.integrate.local_steps.saved_islands import adopt_vectors

        adopt_vectors(self, saved, part)

    def refuse_shared(self, what: str) -> None:
        """Raise StateError inside `shared`, where the model does not hold the own weights."""
        if self.is_shared:
            raise StateError(
                f"{what} inside shared(): the model holds the shared weights; leave it"
            )
