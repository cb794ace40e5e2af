"""DDP's buckets come in, bundles go out, averaged buckets go back.

A bundle is processed when all its parameters have arrived, in whatever buckets they came; a bucket
is answered when all bundles it has a part in are done. Buckets arrive in the same order on every
rank, and so bundles complete in the same order.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.accumulate import Bundle
from gradwire.integrate.attached import alive
from gradwire.integrate.ddp.order import Part
from gradwire.kernels.pieces import Piece, Pieces
from gradwire.state.state import State
from gradwire.types import Slot

ONCE_MORE = 3
"""Resets up to which cuts are made anew: one before the first step, and DDP's rebuilding."""


@dataclass
class Waiting:
    """A bucket that has been handed over and the bundles it still waits for."""

    buffer: Tensor
    future: "Future[object]"
    bundles: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Cut:
    """A bucket as it was cut the first time: the same buffer with the same parameters is cut alike.

    pieces: by bundle, its slices. arrived: by bundle, how many of its parameters they hold.
    """

    key: tuple[object, ...]
    pieces: dict[int, list[Piece]]
    arrived: dict[int, int]
    unsure: list[Part]
    """Those of which it has not been seen in which order DDP fills them."""
    turned: list[Part]
    """Those that DDP fills in another order than it reads them."""


class Buckets:
    """Sorts the parameters of one step's buckets into bundles."""

    def __init__(self, state: State, names: dict[int, str], *, merge: bool) -> None:
        self._owner = weakref.ref(state)
        self._names = names
        self._merge = merge
        """Whether parameters that follow each other are one piece, a third less for the host."""
        self._bundles: list[Bundle] = []
        self._cuts: dict[int, Cut] = {}
        self._came: dict[int, list[Cut]] = {}
        self._whole: dict[int, tuple[list[Cut], Pieces]] = {}
        self._begun = 0
        self.reset()

    @property
    def _state(self) -> State:
        return alive(self._owner)

    def reset(self) -> None:
        """Forget a step that did not finish."""
        if self._bundles is not self._state.bundles:
            self._bundles, self._cuts, self._whole = self._state.bundles, {}, {}
        self._begun += 1
        if self._begun <= ONCE_MORE:
            # DDP builds its buckets anew, and their memory may have the addresses of the old ones.
            self._cuts = {}
        # Others would keep the memory of buckets that DDP has no longer.
        recent = {id(cut) for cuts in self._came.values() for cut in cuts}
        self._cuts = {i: cut for i, cut in self._cuts.items() if id(cut) in recent}
        self._came = {b.index: [] for b in self._bundles}
        self._missing = {b.index: len(b.slots) for b in self._bundles}
        self._left = len(self._missing)
        self._waiting: list[Waiting] = []

    @property
    def idle(self) -> bool:
        """Whether every bundle of this step is done."""
        return self._left == 0

    def arrive(self, bucket: dist.GradBucket, future: "Future[object]") -> list[Bundle]:
        """Take in one bucket; the bundles that are complete with it."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        ids = [id(p) for p in parameters]
        key = buffer.data_ptr(), buffer.numel(), *ids, *(p.stride() for p in parameters)
        cut = self._cuts.get(bucket.index())
        if cut is None or cut.key != key:
            cut = self._cuts[bucket.index()] = self._cut(buffer, parameters, key)
        if cut.unsure:
            self._look(cut)
        for part in cut.turned:
            part.turn(self._state.home(part.name)[1].stride)
        self._waiting.append(Waiting(buffer, future, set(cut.arrived)))
        complete = []
        for index, count in cut.arrived.items():
            self._came[index].append(cut)
            self._missing[index] -= count
            if self._missing[index] == 0:
                complete.append(self._bundles[index])
        return complete

    def _cut(self, buffer: Tensor, parameters: list[Tensor], key: tuple[object, ...]) -> Cut:
        homes = [self._state.home(self._names[id(p)]) for p in parameters]
        parts = buffer.split([slot.numel for _, slot in homes])
        names = [slot.name for _, slot in homes]
        unsure = [Part(*one) for one in zip(names, parts, parameters, strict=True)]
        cut = Cut(key, {}, {}, unsure, [])
        for index, place, start, n in runs_of(homes, self._merge):
            cut.pieces.setdefault(index, []).append((place, buffer[start : start + n]))
        for bundle, _ in homes:
            cut.arrived[bundle.index] = cut.arrived.get(bundle.index, 0) + 1
        return cut

    def _look(self, cut: Cut) -> None:
        """Keep what waits for a parameter in the order in which DDP reads the answer."""
        for part in cut.unsure:
            _, slot = self._state.home(part.name)
            stride = part.look(slot)
            if stride != slot.stride:
                self._state.reorder(part.name, stride)
            if part.came != stride and part not in cut.turned:
                cut.turned.append(part)
        cut.unsure[:] = [part for part in cut.unsure if not part.certain]

    def pieces(self, bundle: Bundle) -> Pieces:
        """The bundle's gradient, in its order: slices of the buckets it came in."""
        came = self._came[bundle.index]
        known = self._whole.get(bundle.index)
        if known is None or known[0] != came:
            parts = [piece for cut in came for piece in cut.pieces[bundle.index]]
            known = came, Pieces(sorted(parts, key=lambda piece: piece[0]))
            self._whole[bundle.index] = known
        return known[1]

    def finish(self, bundle: Bundle) -> list[Waiting]:
        """The averaged bundle is in the buckets: those that are done with it."""
        self._left -= 1
        for waiting in self._waiting:
            waiting.bundles.discard(bundle.index)
        done = [w for w in self._waiting if not w.bundles]
        self._waiting = [w for w in self._waiting if w.bundles]
        return done

    def abandon(self) -> list[Waiting]:
        """Every bucket that is still waited for."""
        left, self._waiting = self._waiting, []
        return left


def runs_of(homes: Sequence[tuple[Bundle, Slot]], merge: bool) -> list[tuple[int, int, int, int]]:
    """(bundle, place in it, start in the bucket, entries) of parameters in a bucket's order."""
    runs: list[tuple[int, int, int, int]] = []
    start = 0
    for bundle, slot in homes:
        run = bundle.index, slot.offset, start, slot.numel
        if merge and runs:
            index, place, begin, n = runs[-1]
            if (index, place + n) == (bundle.index, slot.offset):
                runs.pop()
                run = index, place, begin, n + slot.numel
        runs.append(run)
        start += slot.numel
    return runs


class UsedParameters:
    """Which parameters took part in the steps since the last exchange, on this rank."""

    def __init__(self, parameters: Sequence[Tensor], names: dict[int, str]) -> None:
        self._used: set[str] = set()
        self._names = [names[id(parameter)] for parameter in parameters]
        self._handles = []
        for parameter in parameters:
            # The hook must not hold the parameter: that would keep the model alive.
            name = names[id(parameter)]
            hook = _marker(self._used, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def refusal(self) -> str:
        """What to say of those that this rank did not use; nothing where no hook was called."""
        unused = [name for name in self._names if name not in self._used] if self._used else []
        if not unused:
            return ""
        return (
            f"{unused[0]!r} got no gradient (one of {len(unused)}). DDP throws away what is "
            "delivered to a parameter that no rank used: use gradwire.attach(ddp, ...), which "
            "keeps it, in place of State and ddp_hook"
        )

    def unused_everywhere(self, bundle: Bundle, state: State) -> list[Slot]:
        """The bundle's parameters that no rank used. Asks the host; costs a small all-reduce."""
        mine = [float(slot.name in self._used) for slot in bundle.slots]
        counts = torch.tensor(mine, dtype=torch.float32, device=state.device)
        used = state.group.all_reduce(counts).tolist()
        return [slot for slot, count in zip(bundle.slots, used, strict=True) if count == 0]

    def clear(self) -> None:
        self._used.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _marker(used: set[str], name: str) -> Callable[[Tensor], None]:
    def mark(_: Tensor) -> None:
        used.add(name)

    return mark
