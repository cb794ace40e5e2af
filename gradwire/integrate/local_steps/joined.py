"""Joined: the set-up of local steps, from the ranks that agree to x, momentum and residuals."""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gradwire.accumulate import Bundle
from gradwire.errors import ConfigError, ExchangeError, GradwireError, StateError
from gradwire.integrate.handshake import compare_settings, handshake
from gradwire.integrate.local_steps.flights import Background, Flight
from gradwire.integrate.local_steps.fragments import cut_model
from gradwire.integrate.local_steps.parts import Parts
from gradwire.integrate.local_steps.vectors import HostVectors, Vectors
from gradwire.integrate.loop import slots_of
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


class Joined(State):
    """The state of `LocalSteps`, in which all ranks begin with the same weights."""

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
        self._make_vectors(arguments.offload)
        self._join_ranks(group)
        for name, part in parts.read().items():
            self.reference.put(name, part)
        if self.config.watch:
            self.watch = SharedWatch(self.model, self.config.watch)

    def _make_vectors(self, offload: bool) -> None:
        """Make x and m, on the device or in the host's memory."""
        device, here = self.parts.device, self.parts.read()
        if offload and device.type not in ("cpu", "cuda"):
            raise ConfigError(f"offload=True needs CUDA or a CPU, and the weights are on {device}")
        make = partial(HostVectors, device=device) if offload else partial(Vectors, device=device)
        shapes = {name: part.shape for name, part in here.items()}
        self.offload = offload
        self.reference: Vectors = make(shapes)
        """x by name, in fp32."""
        self.velocity: Vectors = make(shapes if self.outer_momentum else {})
        """m by name; empty without outer momentum."""

    @property
    def vectors(self) -> tuple[Vectors, Vectors]:
        """x and m."""
        return self.reference, self.velocity

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

    def names_of(self, fragment: int) -> list[str]:
        """Return the parameters of one fragment, in the model's order."""
        return [name for name, number in self.fragment_of.items() if number == fragment]

    # --- the background ---------------------------------------------------------------------------

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
