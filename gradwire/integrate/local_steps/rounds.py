"""Rounds: the way of a difference of weights through an exchange to the update that lands."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.accumulate import Bundle
from gradwire.errors import GradwireError
from gradwire.integrate.local_steps.flights import Flight
from gradwire.integrate.local_steps.fragments import is_turn
from gradwire.integrate.local_steps.joined import Joined, SharedWatch
from gradwire.kernels.scan import LARGEST_U
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.group import uncounted

STRETCH = 1 << 22
"""Entries of a parameter that are worked on at once."""


class Rounds(Joined):
    """The rounds of `LocalSteps`, whose docstring has the rule."""

    # --- when ----------------------------------------------------------------------------------

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
                self._end_round(number, self.overlap)
        self._prefetch_for(self.inner_steps + 1)

    def exchange(self) -> None:
        """Exchange now; afterwards all ranks have the same weights, unless `keep_unsent` is set.

        An update that is on its way lands first. This is a collective call.
        """
        self.refuse_shared("exchange")
        self._raise_broken()
        self._land(self.flights)
        for number in range(self.fragments):
            self._end_round(number, 0)

    @torch.no_grad()
    def _end_round(self, number: int, overlap: int) -> None:
        """Exchange the difference of a fragment, now or beside the next `overlap` steps."""
        # Not `steps`, which the background counts.
        self.parts.agree("local_steps", inner_steps=self.inner_steps)
        self._settle_old()
        flushes = number in self.unflushed
        self.unflushed.discard(number)
        if overlap:
            self._take_off(number, overlap, flushes)
            return
        try:
            self._exchange_now(number, flushes)
        except GradwireError:
            self.parts.give_up()
            raise

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

    def _note_finite(self, bundles: Sequence[Bundle]) -> None:
        """Let all bundles skip the round if a weight is not finite, on all ranks of the island.

        The bundles of other ranks then skip it too. Else some parameters would move alone.
        """
        if not self.parts.axes and len(bundles) < 2:
            return
        failed = torch.zeros((), dtype=torch.bool, device=self.device)
        for bundle in bundles:
            for slot in bundle.slots:
                for (part,) in stretches(self.parts.held(slot.name).reshape(-1)):
                    failed = failed | ~(part.float().abs() <= LARGEST_U / 2).all()
        failed = self.parts.any_failed(failed)
        for bundle in bundles:
            bundle.note_finite(~failed)

    def _difference(self, name: str) -> Tensor:
        """Return how far a parameter has moved since its round began, fp32 and contiguous."""
        weight = self.parts.held(name)
        start = self._start_weight(name, weight).float()
        if start is self.reference.fetch(name):
            start = start.clone()
        return start.sub_(weight.float()).contiguous()

    def _begin_exchange(self, names: Sequence[str], inner_steps: int, flushes: bool) -> None:
        """Compare what ranks could have called alone, as nothing has changed yet, and begin."""
        if not self.group.on_stream:
            self.group.agree(
                "local_steps",
                steps=self.steps,
                inner_steps=inner_steps,
                flush=int(flushes),
                learning_rate=self.lr.rate,
            )
        if isinstance(self.watch, SharedWatch) and self.watch.due(self.steps // self.fragments):
            # Other fragments may land meanwhile.
            self.watch.shared = {name: self.reference[name] for name in names}
            self.watch.check(self.group, self.device, self.steps)
        self._flush = flushes
        self.begin()

    def _average_bundle(self, bundle: Bundle, values: Mapping[str, Tensor]) -> None:
        """Turn the differences of a bundle into its update, in the same memory."""
        with uncounted(self.group):
            self.agree("average", bundle)
        pieces = [(slot.offset, values[slot.name].view(-1)) for slot in bundle.slots]
        self.replace(bundle, pieces)
        # It holds what was sent, and the next exchange is far away.
        bundle.tally.add_up()

    # --- an exchange that waits -------------------------------------------------------------------

    def _exchange_now(self, number: int, flushes: bool) -> None:
        """Exchange a fragment bundle by bundle, each of which lands at once.

        So the differences of one bundle are in memory, and not those of the model. All bundles skip
        the round or none does, because every message says if its rank was finite everywhere.
        """
        names = self.names_of(number)
        bundles = self.bundles_of(number)
        self._note_finite(bundles)
        self._begin_exchange(names, self.inner_steps, flushes)
        ends: dict[str, Tensor] = {}
        any_skipped = torch.zeros((), dtype=torch.bool, device=self.device)
        try:
            for bundle, following in zip(bundles, [*bundles[1:], None], strict=True):
                values = {slot.name: self._difference(slot.name) for slot in bundle.slots}
                # These copies run beside the exchange.
                self._prefetch(bundle, with_momentum=True)
                self._prefetch(following, with_momentum=False)
                self._average_bundle(bundle, values)
                assert bundle.pending is not None, "it was averaged just now"
                skipped = self.status.last_was_skipped([bundle.pending])
                bundle.settle(skipped)
                any_skipped = any_skipped | skipped
                for name in list(values):
                    self._outer_step(name, values.pop(name), skipped)
                    ends[name] = self._start_weight(name, self.parts.held(name))
                    self._store(name)
                    if not self.parts.puts_together:
                        self.parts.put(ends)
                        ends = {}
        except BaseException as error:
            # Some bundles may have landed, here or elsewhere, and others not.
            self.engine.broken = error if isinstance(error, Exception) else self.engine.broken
            raise
        self.status.count += any_skipped
        if self.parts.puts_together:
            # A message inside the island, with all its names in order.
            held = {name: self.parts.held(name) for name in names}
            self.parts.put({name: ends.get(name, part) for name, part in held.items()})
        self.parts.refresh()

    # --- an exchange beside training --------------------------------------------------------------

    def _take_off(self, number: int, overlap: int, flushes: bool) -> None:
        """Take the difference of a fragment, and begin its exchange; it lands `overlap` later."""
        following = self._following(number)
        flight = Flight(number, self.inner_steps, self.inner_steps + overlap, flushes, {})
        for name in self.names_of(number):
            self._prefetch(following.get(name), with_momentum=False)
            flight.values[name] = self._difference(name)
            flight.taken[name] = self.parts.held(name).clone()
            self.reference.drop([name])
        self._note_finite(self.bundles_of(number))
        self.flights.append(flight)
        # Virtual workers take turns in their exchanges, which a thread would break.
        if isinstance(self.group, DistributedGroup):
            self.engine.send(flight, self._exchange)
            return
        try:
            self._exchange(flight)
            flight.arrived()
        except BaseException:
            self.flights.remove(flight)
            raise

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
        self._begin_exchange(list(flight.values), flight.taken_at, flight.flushes)
        for bundle in bundles:
            self._average_bundle(bundle, flight.values)
        skipped = self.was_skipped()
        self._settle(bundles, skipped)
        self.status.count += skipped
        flight.ok = ~skipped
        for update in flight.values.values():
            # Otherwise NaN, or the difference of a part without entries.
            update.masked_fill_(skipped, 0)

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
            following = self._following(flight.number)
            for name, weight in now.items():
                self._prefetch(following.get(name), with_momentum=True)
                self._outer_step(name, flight.values.pop(name), skipped)
                ends[name] = start = self._start_weight(name, weight)
                self._store(name)
                moved = start.float() + (weight.float() - flight.taken.pop(name).float())
                ends[name] = torch.where(skipped, start, moved.to(start.dtype))
                if not self.parts.puts_together:
                    self.parts.put(ends)
                    ends = {}
            self.parts.put(ends)
            self.parts.refresh()

    # --- one parameter ----------------------------------------------------------------------------

    def _start_weight(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight with which a round begins, in the dtype of `weight`."""
        start = self.reference.fetch(name)
        if self.keep_unsent and start.numel():
            bundle, slot = self.home(name)
            start = start - bundle.view(bundle.u, slot)
        return start.to(weight.dtype)

    def _outer_step(self, name: str, update: Tensor, skipped: Tensor) -> None:
        """Take the outer step of one parameter: change m and x in place, and use up `update`."""
        # A skipped bundle is NaN.
        update.masked_fill_(skipped, 0)
        if self.velocity:
            velocity = self.velocity.fetch(name)
            momentum = torch.full_like(skipped, self.outer_momentum, dtype=torch.float32)
            velocity.mul_(torch.where(skipped, 1, momentum)).add_(update)
            for part, speed in stretches(update.view(-1), velocity.view(-1)):
                part.add_(speed * torch.where(skipped, 0, momentum))
        self.reference.fetch(name).sub_(update, alpha=self.outer_lr)

    def _store(self, name: str) -> None:
        """Keep x and m of a parameter, which the outer step has changed."""
        self.reference.store(name)
        if self.velocity:
            self.velocity.store(name)

    def _prefetch(self, bundle: Bundle | None, with_momentum: bool) -> None:
        """Begin to copy x of a bundle to the device if they were offloaded, and m perhaps."""
        names = _names_in(bundle)
        self.reference.prefetch(names)
        if with_momentum and self.velocity:
            self.velocity.prefetch(names)

    def _following(self, number: int) -> dict[str, Bundle]:
        """Return by the first parameter of each bundle of a fragment the bundle after it."""
        bundles = self.bundles_of(number)
        firsts = [bundle.slots[0].name for bundle in bundles]
        return dict(zip(firsts, bundles[1:], strict=False))

    def _prefetch_for(self, step: int) -> None:
        """Begin to copy what is needed first at this inner step: one bundle, to save memory."""
        for flight in self.flights:
            if flight.due == step:
                self._prefetch(next(iter(self.bundles_of(flight.number)), None), with_momentum=True)
        for number in range(self.fragments):
            if is_turn(number, self.fragments, self.every, step):
                first = next(iter(self.bundles_of(number)), None)
                self._prefetch(first, with_momentum=False)


def stretches(*flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield stretches of flat tensors, so that no intermediate is as large as a parameter."""
    yield from zip(*(tensor.split(STRETCH) for tensor in flat), strict=True)


def _names_in(bundle: Bundle | None) -> list[str]:
    return [] if bundle is None else [slot.name for slot in bundle.slots]
