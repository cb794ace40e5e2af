"""Rounds: the set-up of local steps, and the way of a difference to the update that lands."""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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
from gradwire.types import Slot

if TYPE_CHECKING:
    from gradwire.integrate.local_steps.arguments import Arguments

Ranks = dist.ProcessGroup | Group | None


class SharedWatch(Watch):
    """A drift watch that compares x, because only x is equal on all ranks."""

    shared: Mapping[str, Tensor]
    """x of the parameters to compare."""

    def _watched(self) -> dict[str, Tensor]:
        frozen = {n: p for n, p in super()._watched().items() if not p.requires_grad}
        plain = {n: p for n, p in frozen.items() if not hasattr(p, "placements")}
        return {**plain, **self.shared}


class Rounds(State):
    """The rounds of `LocalSteps`, whose docstring has the rule."""

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
            parts.leave()
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
            if isinstance(group, DistributedGroup):
                group.leave(None)
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

    def refuse_shared(self, what: str) -> None:
        """Raise StateError inside `shared`, where the model does not hold the own weights."""
        if self.is_shared:
            raise StateError(
                f"{what} inside shared(): the model holds the shared weights; leave it"
            )
