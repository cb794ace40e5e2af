"""local_steps: exchange weights every few steps, for links too slow to exchange at every step."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.config import Config
from gradwire.errors import StateError
from gradwire.integrate.handshake import handshake
from gradwire.integrate.loop import average, slots_of
from gradwire.integrate.refuse import refuse_for_local_steps
from gradwire.integrate.versions import note_torch
from gradwire.ranks.group import Group, uncounted
from gradwire.state.names import parameter_names, unwrapped
from gradwire.state.state import State
from gradwire.state.stats import Stats

if TYPE_CHECKING:
    from gradwire.integrate.local_steps.arguments import Arguments

_Ranks = dist.ProcessGroup | Group | None


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

    SparseLoCo (Sarfi et al. 2025) differs in its mean, which is over the ranks that sent an entry;
    here the mean is over all ranks.
    """

    averaged = ("residual", "velocity", "weights")

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        arguments: "Arguments",
        *,
        group: _Ranks = None,
    ) -> None:
        super().__init__(arguments.config, model=model)
        self.every, self.keep_unsent = arguments.every, arguments.keep_unsent
        self.outer_lr, self.outer_momentum = arguments.rule
        self.model, self.optimizers = unwrapped(model), list(optimizers)
        self.inner_steps = 0
        """Inner steps so far; `steps` counts the exchanges."""
        self.is_shared = False
        """True inside `shared`: the model holds x, not this rank's weights."""
        names = parameter_names(model)
        self.weights = {names[id(p)]: p for p in model.parameters() if id(p) in names}
        """The model's parameters by name."""
        self._join_ranks(group)
        self.reference = {name: p.detach().float().clone() for name, p in self.weights.items()}
        """x by name, in fp32."""
        self.velocity: dict[str, Tensor] = {}
        """m by name; empty without outer momentum."""
        if self.outer_momentum:
            self.velocity = {name: torch.zeros_like(x) for name, x in self.reference.items()}

    @torch.no_grad()
    def _join_ranks(self, group: _Ranks) -> None:
        """Compare settings with the other ranks, and take over rank 0's weights.

        This is a collective call.
        """
        device = next(iter(self.weights.values())).device
        # Differences of weights are fp32 for every dtype of weights.
        slots = slots_of(
            {
                name: torch.empty(p.shape, dtype=torch.float32, device="meta")
                for name, p in self.weights.items()
            }
        )
        if group is None or isinstance(group, dist.ProcessGroup):
            settings = {
                "every": self.every,
                "outer": [self.outer_lr, self.outer_momentum],
                "keep_unsent": self.keep_unsent,
            }
            group = handshake(group, self.config, slots, device, settings)
        self.open(slots, device, group)
        with uncounted(group):
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if tensor.is_floating_point():
                    # A sum in which all ranks but rank 0 have zeros: a Group has no broadcast.
                    is_source = group.rank == 0
                    term = tensor.detach().clone() if is_source else torch.zeros_like(tensor)
                    tensor.copy_(group.all_reduce(term.contiguous()))

    def step(self) -> None:
        """Count an inner step, and exchange at every `every`-th.

        Call it after every step of the optimiser, also if a GradScaler skipped the step. All ranks
        have to count alike, and the weights of that rank have only moved a little less.
        """
        self.refuse_shared("step")
        self.inner_steps += 1
        if self.inner_steps % self.every == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange now; afterwards all ranks have the same weights, unless `keep_unsent` is set.

        This is a collective call.
        """
        self.refuse_shared("exchange")
        if not self.group.on_stream:
            # Everything that ranks could have called alone, as nothing has changed yet.
            self.group.agree(
                "local_steps",
                steps=self.steps,
                inner_steps=self.inner_steps,
                flush=int(self._flush),
                learning_rate=self.lr.rate,
            )
        starts = self._start_weights()
        differences = {n: starts[n].float() - w.float() for n, w in self.weights.items()}
        own: dict[str, Tensor] = {}
        if self.watch is not None:
            # A drift watch compares the parameters, and only x is equal on all ranks.
            own = {name: weight.clone() for name, weight in self.weights.items()}
            for name, weight in self.weights.items():
                weight.copy_(self.reference[name])
        try:
            average(differences, self)
        except BaseException:
            for name, was in own.items():
                self.weights[name].copy_(was)
            raise
        skipped = self.was_skipped()
        for name, update in differences.items():
            self._outer_step(name, torch.where(skipped, 0, update), skipped)
        for name, start in self._start_weights().items():
            self.weights[name].copy_(start)

    def _start_weights(self) -> dict[str, Tensor]:
        """Return the weights with which a round begins, in their dtype."""
        starts = self.reference
        if self.keep_unsent:
            starts = dict(starts)
            for bundle in self.bundles:
                residual = bundle.residual(self.was_skipped())
                for slot in bundle.slots:
                    starts[slot.name] = starts[slot.name] - bundle.view(residual, slot)
        return {name: starts[name].to(w.dtype) for name, w in self.weights.items()}

    def _outer_step(self, name: str, update: Tensor, skipped: Tensor) -> None:
        """Take the outer step of one parameter: change m and x in place."""
        if self.velocity:
            velocity = self.velocity[name]
            new_velocity = self.outer_momentum * velocity + update
            update = torch.where(skipped, 0, update + self.outer_momentum * new_velocity)
            velocity.copy_(torch.where(skipped, velocity, new_velocity))
        self.reference[name].sub_(update, alpha=self.outer_lr)

    def shared_weights(self) -> dict[str, Tensor]:
        """Return copies of x in fp32: the weights that all ranks had after the last exchange."""
        return {name: x.clone() for name, x in self.reference.items()}

    def shared(self) -> AbstractContextManager[None]:
        """Put x into the model while the block runs, to evaluate or export it.

            with local.shared():
                evaluate(model)

        Afterwards the rank has its own weights and buffers again, bit by bit, also if the block
        failed. Buffers stay the rank's own. What is trained inside is lost. It takes a copy of the
        model. Each rank may call it alone.
        """
        from gradwire.integrate.local_steps.shared import shared

        return shared(self)

    def skip_step(self) -> None:
        """Raise StateError, because the weights have moved already."""
        raise StateError("skip_step: an exchange of weights cannot be taken back")

    def stats(self) -> Stats:
        """Return `Stats`, in which bytes_dense counts a dense all-reduce after every inner step."""
        ranks, width = self.group.size, sum(p.nbytes for p in self.weights.values())
        dense = self.inner_steps * (2 * (ranks - 1) * width // ranks)
        return dataclasses.replace(super().stats(), bytes_dense=dense)

    # --- checkpoint ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return State's part, and this rank's weights, buffers and optimisers.

        Between exchanges these differ from rank to rank, so rank 0's model alone is not enough.
        """
        from gradwire.integrate.local_steps.saved import pack

        self.refuse_shared("state_dict")
        return super().state_dict() | pack(self)

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a checked state, weights and optimisers included."""
        from gradwire.integrate.local_steps.saved import load

        super().restore(saved)
        load(self, saved)

    def check_more(self, saved: Mapping[str, Any]) -> None:
        """Raise StateError unless weights, buffers, optimisers and rule fit this model."""
        from gradwire.integrate.local_steps.saved import check

        self.refuse_shared("load")
        check(self, saved)

    def refuse_shared(self, what: str) -> None:
        """Raise StateError inside `shared`, where the model does not hold the own weights."""
        if self.is_shared:
            raise StateError(
                f"{what} inside shared(): the model holds the shared weights; leave it"
            )


def local_steps(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    every: int | None = None,
    *,
    recipe: str | None = None,
    outer: str | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    keep_unsent: bool | None = None,
    group: _Ranks = None,
    config: Config | None = None,
    **fields: Any,
) -> LocalSteps:
    """Exchange weights every `every` steps instead of gradients at each: DiLoCo, SparseLoCo.

        optimizer = gradwire.optim.muon(model, lr=0.004)
        local = gradwire.local_steps(model, optimizer, recipe="muon")
        for batch in batches:
            optimizer.zero_grad(); loss(model, batch).backward(); optimizer.step()
            local.step()

    Every rank trains the plain `model` with optimisers of its own: one, or a list of several. After
    `every` steps the difference of weights is compressed with error feedback and averaged. The mean
    is the gradient of an outer step. This is a collective call: ranks start from rank 0's weights.
    It takes 8 bytes per parameter, and 4 more with outer momentum.

    recipe: a set of the other arguments, by name: "muon" or "muon-wan" (`gradwire methods`). Rank 0
    prints what it stands for. Arguments that are named beside it win.
    outer: "nesterov" (lr 1, momentum 0.5; the default), or "average" (lr 1, no momentum).
    outer_lr, outer_momentum: replace these two numbers.
    keep_unsent: a rank's weights keep the differences that the rank has not sent yet. Ranks then
    differ after an exchange too. `shared()` puts the weights that all ranks share into the model,
    and `flush()` before the last exchange makes all ranks equal.
    group: the ranks, as a process group or a virtual worker's group.
    fields: fields of Config. Without a recipe the defaults are method "chunked", density 0.05,
    values "int4" and indices "packed".
    """
    # Loaded only here, as the other modules of this folder.
    from gradwire.integrate.local_steps.arguments import read_arguments, warn_without_muon

    note_torch()
    optimizers = refuse_for_local_steps(model, optimizer)
    named = {
        "every": every,
        "recipe": recipe,
        "outer": outer,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "keep_unsent": keep_unsent,
    }
    given = {name: value for name, value in named.items() if value is not None} | fields
    arguments = read_arguments(config, given)
    if recipe:
        warn_without_muon(recipe, optimizers)
    local = LocalSteps(model, optimizers, arguments, group=group)
    if recipe and local.group.rank == 0:
        print(f"gradwire: {arguments}", file=sys.stderr)
    return local
