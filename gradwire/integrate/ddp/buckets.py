"""Buckets: sort the parameters of DDP's buckets into bundles, and the averages back into buckets.

A bundle is complete when all its parameters have arrived, in any number of buckets. A bucket is
answered when all bundles that share parameters with it are done. Buckets arrive in the same order
on every rank, so bundles are complete in the same order.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.accumulate import Bundle
from gradwire.integrate.attached import live_state
from gradwire.integrate.ddp.order import BucketPart
from gradwire.kernels.pieces import Piece, Pieces
from gradwire.state.state import State
from gradwire.types import Slot

RESETS_WITHOUT_CUTS = 3
"""The first resets, which forget all cuts: one before the first step, and DDP's rebuilding."""


@dataclass
class WaitingBucket:
    """A bucket that DDP has handed over, and the indices of the bundles that it waits for."""

    buffer: Tensor
    future: "Future[object]"
    bundles: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class _Cut:
    """The slices of a bucket, by bundle; kept for later steps with the same buffer.

    key: the buffer and the parameters that the cut is for.
    pieces: by bundle, the slices of the bucket. arrived: by bundle, the number of parameters in
    these slices.
    """

    key: tuple[object, ...]
    pieces: dict[int, list[Piece]]
    arrived: dict[int, int]
    uncertain: list[BucketPart]
    """Parts for which the order of DDP's filling is not known yet."""
    reordered: list[BucketPart]
    """Parts that DDP fills in one order and reads in another."""


class Buckets:
    """The buckets and bundles of one step, and the cuts of the buckets for all steps."""

    def __init__(self, state: State, names: dict[int, str], *, merge: bool) -> None:
        self._owner = weakref.ref(state)
        self._names = names
        self._merge = merge
        """True: neighbouring parameters are one piece, which saves a third of the host's time."""
        self._bundles: list[Bundle] = []
        self._cuts: dict[int, _Cut] = {}
        self._cuts_of: dict[int, list[_Cut]] = {}
        """By bundle, the cuts of this step's buckets."""
        self._pieces_of: dict[int, tuple[list[_Cut], Pieces]] = {}
        """By bundle, the pieces that were made of these cuts."""
        self._resets = 0
        self.reset()

    @property
    def _state(self) -> State:
        return live_state(self._owner)

    def reset(self) -> None:
        """Begin a step; forget an earlier step that did not finish."""
        if self._bundles is not self._state.bundles:
            self._bundles, self._cuts, self._pieces_of = self._state.bundles, {}, {}
        self._resets += 1
        if self._resets <= RESETS_WITHOUT_CUTS:
            # DDP builds its buckets anew, and their memory may have the addresses of the old ones.
            self._cuts = {}
        # Cuts of buckets that DDP has no longer would keep the memory of these buckets.
        recent = {id(cut) for cuts in self._cuts_of.values() for cut in cuts}
        self._cuts = {i: cut for i, cut in self._cuts.items() if id(cut) in recent}
        self._cuts_of = {b.index: [] for b in self._bundles}
        self._missing = {b.index: len(b.slots) for b in self._bundles}
        self._bundles_left = len(self._missing)
        self._waiting: list[WaitingBucket] = []

    @property
    def is_done(self) -> bool:
        """True: every bundle of this step is done."""
        return self._bundles_left == 0

    def add_bucket(self, bucket: dist.GradBucket, future: "Future[object]") -> list[Bundle]:
        """Take in one bucket, and return the bundles that this bucket completes."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        ids = [id(p) for p in parameters]
        key = buffer.data_ptr(), buffer.numel(), *ids, *(p.stride() for p in parameters)
        cut = self._cuts.get(bucket.index())
        if cut is None or cut.key != key:
            cut = self._cuts[bucket.index()] = self._cut(buffer, parameters, key)
        if cut.uncertain:
            self._find_orders(cut)
        for part in cut.reordered:
            part.reorder(self._state.home(part.name)[1].stride)
        self._waiting.append(WaitingBucket(buffer, future, set(cut.arrived)))
        complete = []
        for index, count in cut.arrived.items():
            self._cuts_of[index].append(cut)
            self._missing[index] -= count
            if self._missing[index] == 0:
                complete.append(self._bundles[index])
        return complete

    def _cut(self, buffer: Tensor, parameters: list[Tensor], key: tuple[object, ...]) -> _Cut:
        homes = [self._state.home(self._names[id(p)]) for p in parameters]
        parts = buffer.split([slot.numel for _, slot in homes])
        names = [slot.name for _, slot in homes]
        fields = zip(names, parts, parameters, strict=True)
        cut = _Cut(key, {}, {}, [BucketPart(*part) for part in fields], [])
        for index, offset, start, numel in runs_of(homes, self._merge):
            cut.pieces.setdefault(index, []).append((offset, buffer[start : start + numel]))
        for bundle, _ in homes:
            cut.arrived[bundle.index] = cut.arrived.get(bundle.index, 0) + 1
        return cut

    def _find_orders(self, cut: _Cut) -> None:
        """Find the orders of uncertain parts; give residuals the order in which DDP reads."""
        for part in cut.uncertain:
            _, slot = self._state.home(part.name)
            stride = part.find_strides(slot)
            if stride != slot.stride:
                self._state.reorder(part.name, stride)
            if part.filled != stride and part not in cut.reordered:
                cut.reordered.append(part)
        cut.uncertain[:] = [part for part in cut.uncertain if not part.certain]

    def pieces(self, bundle: Bundle) -> Pieces:
        """Return the bundle's gradient: slices of the buckets, in the bundle's order."""
        cuts = self._cuts_of[bundle.index]
        known = self._pieces_of.get(bundle.index)
        if known is None or known[0] != cuts:
            slices = [piece for cut in cuts for piece in cut.pieces[bundle.index]]
            known = cuts, Pieces(sorted(slices, key=lambda piece: piece[0]))
            self._pieces_of[bundle.index] = known
        return known[1]

    def finish_bundle(self, bundle: Bundle) -> list[WaitingBucket]:
        """Note that a bundle is averaged, and return the buckets that wait for no other bundle."""
        self._bundles_left -= 1
        for waiting in self._waiting:
            waiting.bundles.discard(bundle.index)
        done = [w for w in self._waiting if not w.bundles]
        self._waiting = [w for w in self._waiting if w.bundles]
        return done

    def drop_waiting(self) -> list[WaitingBucket]:
        """Return the buckets that were not answered, and forget them."""
        waiting, self._waiting = self._waiting, []
        return waiting


def runs_of(homes: Sequence[tuple[Bundle, Slot]], merge: bool) -> list[tuple[int, int, int, int]]:
    """Return (bundle, offset in the bundle, start in the bucket, entries) of each run.

    homes: the parameters in the bucket's order. merge: make parameters that are neighbours in both
    the bucket and the bundle one run.
    """
    runs: list[tuple[int, int, int, int]] = []
    start = 0
    for bundle, slot in homes:
        run = bundle.index, slot.offset, start, slot.numel
        if merge and runs:
            index, offset, begin, numel = runs[-1]
            if (index, offset + numel) == (bundle.index, slot.offset):
                runs.pop()
                run = index, offset, begin, numel + slot.numel
        runs.append(run)
        start += slot.numel
    return runs


class UsedParameters:
    """The names of the parameters that this rank used since the last exchange."""

    def __init__(self, parameters: Sequence[Tensor], names: dict[int, str]) -> None:
        self._used: set[str] = set()
        self._names = [names[id(parameter)] for parameter in parameters]
        self._handles = []
        for parameter in parameters:
            # The hook must not hold the parameter: that would keep the model alive.
            name = names[id(parameter)]
            hook = _recorder(self._used, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def refusal(self) -> str:
        """Return the error text for parameters that this rank did not use; empty if it used all."""
        # No name at all means that no hook was called, which tells nothing about parameters.
        unused = [name for name in self._names if name not in self._used] if self._used else []
        if not unused:
            return ""
        return (
            f"{unused[0]!r} got no gradient (one of {len(unused)}). DDP throws away what is "
            "delivered to a parameter that no rank used: use gradwire.attach(ddp, ...), which "
            "keeps it, in place of State and ddp_hook"
        )

    def unused_everywhere(self, bundle: Bundle, state: State) -> list[Slot]:
        """Return the bundle's parameters that no rank used.

        Waits for the device, and costs a small all-reduce.
        """
        flags = [float(slot.name in self._used) for slot in bundle.slots]
        counts = torch.tensor(flags, dtype=torch.float32, device=state.device)
        used = state.group.all_reduce(counts).tolist()
        return [slot for slot, count in zip(bundle.slots, used, strict=True) if count == 0]

    def clear(self) -> None:
        self._used.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _recorder(used: set[str], name: str) -> Callable[[Tensor], None]:
    def record(_: Tensor) -> None:
        used.add(name)

    return record
