"""State of one bundle: its residual, its momentum, its method's memory and its last delivery."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.accumulate.delivery import Pending
from gradwire.accumulate.layout import size_of
from gradwire.accumulate.momentum import Correction, clip_factor
from gradwire.accumulate.owned import OWNED, owned_places, spread_part
from gradwire.accumulate.tally import Tally
from gradwire.kernels.dispatch import has_kernels, on_references
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.scan import Piece, usable
from gradwire.types import ALIGN, Delivered, Entries, Memory, Scan, Slot


class Bundle:
    """Parameters that are compressed as one vector, with error feedback.

    After a step the buffer still holds u. The delivery is subtracted when the next step begins.
    Only then is the fate of the step known: taken or skipped by the optimiser. `residual()` shows
    the value with the subtraction done.
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
        decay: float = 1.0,
    ) -> None:
        self.slots = list(slots)
        self.index = index
        self.dense = dense
        self.size = size_of(slots)
        self.entries = sum(slot.numel for slot in slots)
        self.dtype = slots[0].dtype
        self.buffer = torch.zeros(self.size + 1, dtype=torch.float32, device=device)
        """u, and one spare entry that padding indices point to."""
        self.u = self.buffer[: self.size]
        """gradient + residual."""
        self.correction = correction
        self.decay = decay
        """The factor on the residual after an exchange."""
        self.velocity = torch.zeros_like(self.buffer) if correction.momentum else None
        """Momentum, with a spare entry as the buffer has."""
        self.memory = Memory(rank, index, ranks)
        self.memory.lay_out(slots, device)
        self.pending: Pending | None = None
        """The delivery of the last step; None when there is nothing to settle."""
        self.tally = Tally(device)
        self._withheld: list[tuple[int, Tensor]] = []
        self._unused: Sequence[Slot] = ()
        """The parameters that no rank used in this step."""
        self._finite_so_far: Tensor | None = None
        """False if a micro-batch or a new rate brought what is not finite since the last step."""
        self._maxima = torch.zeros(0, dtype=torch.float32, device=device)
        self._last_selection = LastSelection(device) if has_kernels(device) else None

    @property
    def _edge(self) -> LastSelection | None:
        """The notes that scan and selection leave for each other; the references have none."""
        return None if on_references() else self._last_selection

    @property
    def masks(self) -> bool:
        """True: momentum ends where something was delivered."""
        return self.velocity is not None and self.correction.masking

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this bundle occupies."""
        rounding = 0 if self.dtype == torch.float32 else self.buffer.nbytes
        velocity = 0 if self.velocity is None else self.velocity.nbytes
        return self.buffer.nbytes + velocity + self._maxima.nbytes + rounding

    # --- a step -------------------------------------------------------------------------------

    def accumulate(
        self,
        pieces: Sequence[Piece],
        block: int,
        skipped: Tensor,
        unscale: Tensor | None = None,
        unused: Sequence[Slot] = (),
        maxima16: bool = False,
    ) -> Scan:
        """Compute u = gradient + residual in place, and settle the last step first.

        With momentum correction the residual takes in the momentum instead of the gradient.
        block: entries per maximum that the scan leaves, 0 for none.
        skipped: True (0-d) if the optimiser did not take the last step.
        unscale: the factor on the gradient.
        unused: parameters that no rank used. DDP throws away the mean of such a parameter. The
        residual of the parameter is therefore put aside until the step is settled.
        maxima16: True if 16 bits of the maxima are enough.
        """
        scan_settles = block > 0 and self._scan_can_settle(unused)
        if scan_settles:
            self._take_owned(skipped)
            self.pending = None
        else:
            self.settle(skipped)
        self._withhold(unused)
        maxima = self._maxima_of(block, maxima16) if block else None
        if maxima is not None and unused:
            # No piece covers these slots, so their blocks would keep the maxima of an earlier step.
            maxima.zero_()
        if self.correction.clip and pieces:
            unscale, clipped = clip_factor(pieces, self.correction.clip, self.memory.ranks, unscale)
            self.tally.clipped += clipped
        finite = self._scan(pieces, maxima, block or ALIGN, unscale, skipped, scan_settles)
        if self._finite_so_far is not None:
            finite, self._finite_so_far = finite & self._finite_so_far, None
        return Scan(finite, maxima, block, self._edge)

    def add_microbatch(
        self, pieces: Sequence[Piece], skipped: Tensor, unscale: Tensor | None = None
    ) -> None:
        """Add a micro-batch to the residual; the step that delivers comes later.

        The sum over micro-batches is one gradient. Momentum, which decays once per step, and a
        bound on the norm need that sum made outside.
        """
        assert self.velocity is None, "momentum would decay with every micro-batch"
        self.settle(skipped)
        self.note_finite(kernels.scan(self.u, pieces, None, ALIGN, unscale))

    def note_finite(self, finite: Tensor) -> None:
        """Make the next step skip this bundle unless `finite` (0-d)."""
        before = self._finite_so_far
        self._finite_so_far = finite if before is None else finite & before

    def deliver(
        self,
        delivered: Delivered,
        ok: Tensor,
        mean_rounding: Tensor | None = None,
        masked: Tensor | None = None,
        forget: bool = False,
        owned_rounding: Tensor | None = None,
    ) -> None:
        """Remember the delivery of this step; the next step settles it: see Pending."""
        if owned_rounding is not None:
            owned_rounding = self._owned_of_used(owned_rounding)
        self.pending = Pending(
            delivered, ok, mean_rounding, masked, forget, self._withheld, owned_rounding
        )
        self._withheld = []

    def settle(self, skipped: Tensor) -> None:
        """Make u the residual, and mask the momentum; both stay after a `skipped` step (0-d)."""
        if self.pending is not None:
            self.tally.forgotten = self.forgotten(skipped)
            self._settle(self.buffer, skipped)
            if self.velocity is not None:
                self.pending.mask(self.velocity, skipped)
            self._take_owned(skipped)
            self.pending = None

    def _settle(self, buffer: Tensor, skipped: Tensor) -> None:
        """Turn u in `buffer` into the residual that the next step will find."""
        if self.pending is not None:
            self.pending.settle(buffer, skipped)
            if self.decay != 1:
                # forgotten = old - new, so the sum of both stays exact.
                buffer.mul_(torch.where(skipped, 1.0, self.decay))

    def forgotten(self, skipped: Tensor) -> Tensor:
        """Return the energy that decay took so far, and that of all u (fp64 [2])."""
        if self.decay == 1 or self.pending is None:
            return self.tally.forgotten
        old = self.buffer.clone()
        self.pending.settle(old, skipped)
        norms = torch.stack(
            [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (old, self.buffer)]
        )
        norms[0] *= 1 - self.decay
        return self.tally.forgotten + torch.where(skipped, 0, norms.square())

    def _scan_can_settle(self, unused: Sequence[Slot]) -> bool:
        """Return True if the scan, which reads every entry, can settle the last step on its way."""
        last, edge = self.pending, self._edge
        if edge is None or last is None or last.mean_rounding is not None or self.decay != 1:
            return False
        if last.withheld or unused or self.velocity is not None:
            return False
        sent = last.delivered
        return isinstance(sent, Entries) and edge.is_of(sent.sparse.indices, sent.sparse.values)

    def _scan(
        self,
        pieces: Sequence[Piece],
        maxima: Tensor | None,
        block: int,
        unscale: Tensor | None,
        skipped: Tensor,
        settles: bool,
    ) -> Tensor:
        edge = None if maxima is None else self._edge
        if self.velocity is None:
            before = skipped if settles else None
            return kernels.scan(self.u, pieces, maxima, block, unscale, edge, before)
        velocity, rule = self.velocity[: self.size], self.correction
        return kernels.momentum(
            self.u, velocity, pieces, maxima, block, rule.momentum, unscale, rule.nesterov, edge
        )

    def _maxima_of(self, block: int, maxima16: bool) -> Tensor:
        # Made when first needed, because only then is the size of a block known.
        dtype = torch.int16 if maxima16 and self._edge is not None else torch.float32
        if self._maxima.numel() != self.size // block or self._maxima.dtype != dtype:
            device = self.buffer.device
            self._maxima = torch.zeros(self.size // block, dtype=dtype, device=device)
        return self._maxima

    def _withhold(self, unused: Sequence[Slot]) -> None:
        self._unused = unused
        for slot in unused:
            part = self.buffer[slot.offset : slot.offset + slot.numel]
            self._withheld.append((slot.offset, part.clone()))
            part.zero_()

    # --- the part of the mean that this rank owns ---------------------------------------------

    @property
    def keeps_owned(self) -> bool:
        """True: this rank keeps the rounding of a part of the mean, or has just made one."""
        is_new = self.pending is not None and self.pending.owned_rounding is not None
        return is_new or OWNED in self.memory

    def owned_rounding(self, skipped: Tensor) -> Tensor:
        """Return the rounding of this rank's part of the mean, as the next step will find it."""
        kept, last = self.memory.get(OWNED), self.pending
        if last is None or last.owned_rounding is None:
            assert kept is not None, "this rank owns no part"
            return kept
        return torch.where(skipped, 0.0 if kept is None else kept, last.owned_rounding)

    def owned_vector(self, skipped: Tensor) -> Tensor:
        """Return `owned_rounding` as a vector of the bundle, zero outside of this rank's part."""
        memory = self.memory
        return spread_part(self.owned_rounding(skipped), memory.rank, memory.ranks, self.size)

    def fold_owned(self, skipped: Tensor) -> None:
        """Settle the last step, and move what this rank keeps of the mean into its residual.

        The rounding counts once per rank in a sum of residuals, so it is multiplied by the ranks.
        """
        if self.keeps_owned:
            self.settle(skipped)
            self.u.add_(self.owned_vector(skipped), alpha=self.memory.ranks)
            del self.memory[OWNED]

    def _take_owned(self, skipped: Tensor) -> None:
        if self.keeps_owned:
            self.memory[OWNED] = self.owned_rounding(skipped)

    def _owned_of_used(self, rounding: Tensor) -> Tensor:
        """Return the new rounding without padding; of unused parameters the old one stays.

        Their mean is thrown away, and padding has no mean. But codes like `sign` send something for
        a zero.
        """
        derived, device = self.memory.derived, self.buffer.device
        if "owned_places" not in derived:
            places = owned_places(self.memory, self.size, self.slots, device)
            derived["owned_places"] = places
        rounding = torch.where(derived["owned_places"], rounding, 0.0)
        if self._unused:
            places = owned_places(self.memory, self.size, self._unused, device)
            kept = self.memory.get(OWNED)
            rounding = torch.where(places, 0.0 if kept is None else kept, rounding)
        return rounding

    # --- between steps ------------------------------------------------------------------------

    @property
    def withheld(self) -> list[tuple[int, Tensor]]:
        """(offset, residual) of each parameter that the last step left out."""
        return [] if self.pending is None else self.pending.withheld

    def reweigh(self, factor: float, skipped: Tensor) -> None:
        """Settle the last step, and multiply the residual by `factor`.

        A residual that would become too large stays as it is. The next step is then not finite.
        """
        self.settle(skipped)
        if OWNED in self.memory:
            # In no message as it is, so it may not be changed in place.
            self.memory[OWNED] = self.memory[OWNED] * factor
        if factor <= 1:
            self.buffer.mul_(factor)
            return
        largest = torch.linalg.vector_norm(self.buffer, float("inf"))
        worth = torch.full_like(largest, factor)
        fits = usable(largest * worth, largest)
        self.note_finite(fits)
        self.buffer.mul_(torch.where(fits, worth, 1))

    def reorder(self, old: Slot, new: Slot) -> None:
        """Move a slot's entries to where other strides put them. The last step must be settled."""
        for flat in (self.buffer, self.velocity):
            if flat is not None:
                self.view(flat, new).copy_(self.view(flat, old).clone())
        self.slots[self.slots.index(old)] = new

    def residual(self, skipped: Tensor) -> Tensor:
        """Return a copy of the residual as the next step will find it."""
        out = self.buffer.clone()
        self._settle(out, skipped)
        return out[: self.size]

    def momentum(self, skipped: Tensor) -> Tensor:
        """Return a copy of the momentum, masked as the next step will find it."""
        assert self.velocity is not None, "there is no momentum correction"
        out = self.velocity.clone()
        if self.pending is not None:
            self.pending.mask(out, skipped)
        return out[: self.size]

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """Return a parameter's part of a flat vector, in the parameter's shape and memory order."""
        return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset)
