"""LocalSteps: the handle that `local_steps` returns."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.errors import StateError
from gradwire.integrate.local_steps.rounds import Rounds
from gradwire.ranks.group import Group
from gradwire.state.stats import Stats

if TYPE_CHECKING:
    from gradwire.state.saved.cuts import Cut, MoreSaved


class LocalSteps(Rounds):
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

    With `offload` x and m are in the host's memory, and on the device for as long as an exchange
    needs them, bundle by bundle. The bits are the same.

    In islands a rank holds x, m and residual of its part of the model alone, and a rank above is
    an island. The parts of an island skip a round together.

    SparseLoCo (Sarfi et al. 2025) differs in its mean, which is over the ranks that sent an entry;
    here the mean is over all ranks.
    """

    # --- what users call ------------------------------------------------------------------------

    def flush(self) -> None:
        """Send everything that is kept with the next exchange, of every fragment."""
        self.unflushed = set(range(self.fragments))

    def shared_weights(self) -> dict[str, Tensor]:
        """Return copies of x in fp32: the weights that all ranks had after the last exchange.

        In an island they are whole with DDP, and DTensors with FSDP2; all its ranks call it.
        """
        copies = {name: x.to(self.device, copy=True) for name, x in self.reference.items()}
        return self.parts.join(copies)

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
        if name in self.reference and not self.parts.held(name).numel():
            # An empty part is in no bundle.
            return torch.zeros_like(self.parts.held(name), dtype=torch.float32)
        return super().residual(name)

    def memory_use(self) -> dict[str, int]:
        """Return the bytes that this rank holds beside weights and optimiser, by their use.

        All but the first are of the weights' device, and the last four of an exchange at its peak.
        What a method needs to choose entries comes on top.
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
