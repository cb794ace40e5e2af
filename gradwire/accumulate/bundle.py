"""One bundle's state: its residual, what its method remembers, what it has just delivered."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.accumulate.layout import size_of
from gradwire.accumulate.momentum import Correction, clip_factor
from gradwire.kernels.backend import uses_triton
from gradwire.kernels.edge import Edge
from gradwire.kernels.scan import Piece
from gradwire.types import ALIGN, Delivered, Memory, Scan, Slot


class Bundle:
    """Parameters that are compressed as one vector, with error feedback.

    After a step the buffer still holds u; what was delivered is subtracted when the next step
    begins, because only then is it known whether the optimiser took the step. `residual()` shows
    the value with that already done.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        device: torch.device,
        *,
        rank: int,
        index: int,
        dense: bool,
        ranks: int = 1,
        correction: Correction = Correction(),
    ) -> None:
        self.slots = list(slots)
        self.index = index
        self.dense = dense
        self.size = size_of(slots)
        self.entries = sum(slot.numel for slot in slots)
        self.dtype = slots[0].dtype
        self.buffer = torch.zeros(self.size + 1, dtype=torch.float32, device=device)
        self.correction = correction
        self.velocity = torch.zeros_like(self.buffer) if correction.momentum else None
        """Momentum, with a spare entry as the buffer has."""
        self.memory = Memory(rank, index, ranks)
        self.memory.lay_out(slots, device)
        self.delivered: Delivered | None = None
        self.chosen: tuple[Any, ...] = ()
        """What `choose` said last, and of what."""
        self.held: list[tuple[int, Tensor]] = []
        self._early: Tensor | None = None
        """Whether the micro-batches taken in since the last step were finite."""
        self.u = self.buffer[: self.size]
        """gradient + residual, the spare entry left out."""
        self.energy = torch.zeros(2, dtype=torch.float64, device=device)
        self.sent = torch.zeros((), dtype=torch.int64, device=device)
        self._rounded: list[tuple[Tensor, Tensor]] = []
        self._counts: list[Tensor] = []
        self.leaked = torch.zeros(2, dtype=torch.float64, device=device)
        self.clipped = torch.zeros((), dtype=torch.int64, device=device)
        self._maxima = torch.zeros(0, dtype=torch.float32, device=device)
        self._edge = Edge(device) if uses_triton(device) else None

    @property
    def masks(self) -> bool:
        """Whether momentum ends where something was delivered."""
        return self.velocity is not None and self.correction.masking

    @property
    def nbytes(self) -> int:
        """Memory this bundle holds on to."""
        loss = 0 if self.dtype == torch.float32 else self.buffer.nbytes
        velocity = 0 if self.velocity is None else self.velocity.nbytes
        return self.buffer.nbytes + velocity + self._maxima.nbytes + loss

    def accumulate(
        self,
        pieces: Sequence[Piece],
        group: int,
        skipped: Tensor,
        unscale: Tensor | None = None,
        unused: Sequence[Slot] = (),
        rough: bool = False,
    ) -> Scan:
        """u = gradient + residual, in place; first settles the last step unless it was skipped.

        With momentum correction the residual takes in the momentum instead of the gradient.
        The residual of `unused` parameters is put aside until the step is settled: DDP throws away
        what is delivered to them. rough: 16 bits of the maxima are enough, where that pays.
        """
        cleared = group > 0 and self._clears(unused)
        if cleared:
            self.delivered = None
        else:
            self.settle(skipped)
        self._withhold(unused)
        maxima = self._maxima_of(group, rough) if group else None
        if maxima is not None and unused:
            # No piece covers these slots: their groups must not keep the maxima of an earlier step.
            maxima.zero_()
        if self.correction.clip and pieces:
            unscale, clipped = clip_factor(pieces, self.correction.clip, self.memory.ranks, unscale)
            self.clipped += clipped
        finite = self._scan(pieces, maxima, group or ALIGN, unscale, skipped if cleared else None)
        if self._early is not None:
            finite, self._early = finite & self._early, None
        return Scan(finite, maxima, group, self._edge)

    def hold(self, pieces: Sequence[Piece], skipped: Tensor, unscale: Tensor | None = None) -> None:
        """Add a micro-batch to the residual; the step that delivers comes later.

        The sum over micro-batches is one gradient: with momentum, which decays once a step, or a
        bound on the norm it has to be added up outside.
        """
        assert self.velocity is None, "momentum would decay with every micro-batch"
        self.settle(skipped)
        finite = kernels.scan(self.u, pieces, None, ALIGN, unscale)
        self._early = finite if self._early is None else finite & self._early

    def _clears(self, unused: Sequence[Slot]) -> bool:
        """Whether the scan, which must look at every entry, can settle the last step itself."""
        sent, edge = self.delivered, self._edge
        if edge is None or sent is None or sent.loss is not None or self.held or unused:
            return False
        return self.velocity is None and edge.explains(sent.indices, sent.values)

    def _scan(
        self,
        pieces: Sequence[Piece],
        maxima: Tensor | None,
        group: int,
        unscale: Tensor | None,
        skipped: Tensor | None,
    ) -> Tensor:
        edge = None if maxima is None else self._edge
        if self.velocity is None:
            return kernels.scan(self.u, pieces, maxima, group, unscale, edge, skipped)
        velocity, rule = self.velocity[: self.size], self.correction
        return kernels.momentum(
            self.u, velocity, pieces, maxima, group, rule.momentum, unscale, rule.nesterov, edge
        )

    def _maxima_of(self, group: int, rough: bool) -> Tensor:
        """Made when first needed: only then is the size of a group known."""
        dtype = torch.int16 if rough and self._edge is not None else torch.float32
        if self._maxima.numel() != self.size // group or self._maxima.dtype != dtype:
            device = self.buffer.device
            self._maxima = torch.zeros(self.size // group, dtype=dtype, device=device)
        return self._maxima

    def _withhold(self, unused: Sequence[Slot]) -> None:
        for slot in unused:
            part = self.buffer[slot.offset : slot.offset + slot.numel]
            self.held.append((slot.offset, part.clone()))
            part.zero_()

    def note_rounding(self, values: Tensor, seen: Tensor) -> None:
        """What `tally` takes the energy of: values, and what receivers do not see of them."""
        self._rounded.append((values, seen))

    def note_sent(self, count: Tensor) -> None:
        """How many entries left, 0-d, for `tally`."""
        self._counts.append(count)

    def tally(self) -> None:
        """Add up what was noted. Not in the step itself, where others wait for its answer."""
        for values, seen in self._rounded:
            both = torch.stack([values, values - seen])
            norms = torch.linalg.vector_norm(both, dim=1, dtype=torch.float64)
            self.energy.addcmul_(norms, norms)
        for count in self._counts:
            self.sent += count
        self._rounded, self._counts = [], []

    def settle(self, skipped: Tensor) -> None:
        """residual = u - delivered + rounding loss; with `skipped` (0-d bool) it stays u.

        Likewise the momentum, of which nothing is masked by a step that did not happen.
        """
        if self.delivered is not None:
            _settle(self.buffer, self.delivered, self.held, skipped)
            if self.velocity is not None:
                _mask(self.velocity, self.delivered, skipped)
            self.delivered = None
            self.held = []

    def reweigh(self, factor: float, skipped: Tensor) -> None:
        """Settle the last step, and multiply what is kept."""
        self.settle(skipped)
        self.buffer.mul_(factor)

    def reorder(self, old: Slot, new: Slot) -> None:
        """Move a slot's entries to where they are with other strides. What waits is settled."""
        for flat in (self.buffer, self.velocity):
            if flat is not None:
                self.view(flat, new).copy_(self.view(flat, old).clone())
        self.slots[self.slots.index(old)] = new

    def residual(self, skipped: Tensor) -> Tensor:
        """A copy of the residual as the next step will find it."""
        out = self.buffer.clone()
        if self.delivered is not None:
            _settle(out, self.delivered, self.held, skipped)
        return out[: self.size]

    def momentum(self, skipped: Tensor) -> Tensor:
        """A copy of the momentum as the next step will find it."""
        assert self.velocity is not None, "there is no momentum correction"
        out = self.velocity.clone()
        if self.delivered is not None:
            _mask(out, self.delivered, skipped)
        return out[: self.size]

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """A parameter's part of a flat vector, in the parameter's own shape and memory order."""
        return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset)


def _settle(
    buffer: Tensor, delivered: Delivered, held: list[tuple[int, Tensor]], skipped: Tensor
) -> None:
    if delivered.forget:
        buffer.zero_()
        return
    if delivered.values is None:
        buffer.mul_(skipped)
    elif delivered.indices is None:
        buffer[:-1].sub_(torch.where(skipped, 0, delivered.values))
    else:
        kernels.settle(buffer, delivered.indices, delivered.values, skipped)
    if delivered.loss is not None:
        # Where nothing happened the loss may be infinite, and 0 * inf is not 0.
        buffer.add_(torch.where(skipped, 0, delivered.loss))
        buffer[-1:].zero_()
    for offset, kept in held:
        buffer[offset : offset + kept.numel()] = kept


def _mask(velocity: Tensor, delivered: Delivered, skipped: Tensor) -> None:
    if delivered.masked is not None:
        kernels.settle(velocity, delivered.masked, velocity[delivered.masked], skipped)
