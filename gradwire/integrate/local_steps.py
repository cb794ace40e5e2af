"""local_steps: for links too slow for every step."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.config import Config, configure
from gradwire.errors import ConfigError, StateError, unknown
from gradwire.integrate.handshake import meet
from gradwire.integrate.loop import average, slots_of
from gradwire.integrate.refuse import refuse_for_local_steps
from gradwire.integrate.versions import note_torch
from gradwire.ranks.group import Group, uncounted
from gradwire.state.names import parameter_names
from gradwire.state.saved.check import check_alike, check_count, check_optimizer
from gradwire.state.state import State
from gradwire.state.stats import Stats

OUTER = {"nesterov": (1.0, 0.5), "average": (1.0, 0.0)}
"""Outer learning rate and momentum. DiLoCo (Douillard et al. 2023) has Nesterov's 0.7 and 0.9, for
differences that are sent whole; what comes late already acts like momentum."""

DEFAULTS = {"method": "chunked", "density": 0.05, "values": "int4", "indices": "packed"}

Ranks = dist.ProcessGroup | Group | None


class LocalSteps(State):
    """The handle that `local_steps` returns: a State whose gradient is a difference of weights.

    x: the weights that all ranks had after the last exchange. w: this rank's weights now.

        u = x - w + residual,     update = mean over ranks of what was sent of u
        m = momentum m + update,  x = x - lr (update + momentum m),  w = x

    Without momentum x = x - lr update. x and m are fp32 and the same bits on every rank, and so
    is w; what bf16 weights cannot hold of x is kept. A round in which some rank's weights are
    not finite delivers nothing: w = x, and what was finite waits in the residuals.

    With `keep_unsent` w = x - residual: a rank goes on from its own weights where it sent nothing,
    and its gradients see what the others still wait for. The mean of all w, with outer lr 1 and no
    momentum, is then that of ranks that never exchange; an exchange only brings them together.

    Different from SparseLoCo (Sarfi et al. 2025): its residual decays (0.999 a round), this one
    does not, or the law would not hold; its mean is over the ranks that sent, this one over all.
    """

    averaged = ("residual", "velocity", "weights")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: Config,
        *,
        every: int,
        rule: tuple[float, float],
        keep_unsent: bool = False,
        group: Ranks = None,
    ) -> None:
        super().__init__(config, model=model)
        self.every, self.keep_unsent = every, keep_unsent
        self.outer_lr, self.outer_momentum = rule
        self.model, self.optimizer = model, optimizer
        self.inner_steps = 0
        """Inner steps so far; `steps` counts the exchanges."""
        names = parameter_names(model)
        self._weights = {names[id(p)]: p for p in model.parameters() if id(p) in names}
        self._meet(group)
        self._reference = {name: p.detach().float().clone() for name, p in self._weights.items()}
        self._velocity: dict[str, Tensor] = {}
        if self.outer_momentum:
            self._velocity = {name: torch.zeros_like(x) for name, x in self._reference.items()}

    @torch.no_grad()
    def _meet(self, group: Ranks) -> None:
        """Meet the other ranks, and take over rank 0's weights. A collective call."""
        device = next(iter(self._weights.values())).device
        # Differences of weights are in fp32, whatever the weights are in.
        slots = slots_of(
            {
                name: torch.empty(p.shape, dtype=torch.float32, device="meta")
                for name, p in self._weights.items()
            }
        )
        if group is None or isinstance(group, dist.ProcessGroup):
            rule = {"every": self.every, "outer": [self.outer_lr, self.outer_momentum]}
            rule |= {"keep_unsent": self.keep_unsent}
            group = meet(group, self.config, slots, device, rule)
        self.open(slots, device, group)
        with uncounted(group):
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if tensor.is_floating_point():
                    mine = tensor.detach().clone() if group.rank == 0 else torch.zeros_like(tensor)
                    tensor.copy_(group.all_reduce(mine.contiguous()))

    def step(self) -> None:
        """An inner step was taken; every `every`-th time ranks exchange.

        Call it after the optimiser's step, also after one that a GradScaler skipped: ranks have
        to count alike, and the weights of that rank have just moved a little less.
        """
        self.inner_steps += 1
        if self.inner_steps % self.every == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange now; every rank has the same weights then, but for keep_unsent. Collective."""
        if not self.group.on_stream:
            self.group.agree("local_steps", steps=self.steps, inner_steps=self.inner_steps)
        starts = self._starts()
        differences = {n: starts[n].float() - w.float() for n, w in self._weights.items()}
        for name, weight in self._weights.items():
            weight.copy_(self._reference[name])  # what a drift watch compares
        average(differences, self)
        skipped = self.was_skipped()
        for name, update in differences.items():
            self._move(name, torch.where(skipped, 0, update), skipped)
        for name, start in self._starts().items():
            self._weights[name].copy_(start)

    def _starts(self) -> dict[str, Tensor]:
        """The weights that a round begins with, in their dtype."""
        starts = self._reference
        if self.keep_unsent:
            starts = dict(starts)
            for bundle in self.bundles:
                kept = bundle.residual(self.was_skipped())
                for slot in bundle.slots:
                    starts[slot.name] = starts[slot.name] - bundle.view(kept, slot)
        return {name: starts[name].to(w.dtype) for name, w in self._weights.items()}

    def _move(self, name: str, update: Tensor, skipped: Tensor) -> None:
        """The outer step of one parameter."""
        if self._velocity:
            velocity = self._velocity[name]
            heavy = self.outer_momentum * velocity + update
            update = torch.where(skipped, 0, update + self.outer_momentum * heavy)
            velocity.copy_(torch.where(skipped, velocity, heavy))
        self._reference[name].sub_(update, alpha=self.outer_lr)

    def shared_weights(self) -> dict[str, Tensor]:
        """Copies of x, in fp32: the weights that all ranks share, whatever they did since."""
        return {name: x.clone() for name, x in self._reference.items()}

    def skip_step(self) -> None:
        """Not for local steps: the weights have moved."""
        raise StateError("skip_step: an exchange of weights cannot be taken back")

    def stats(self) -> Stats:
        """See `Stats`; bytes_dense is of a dense all-reduce after every inner step."""
        ranks, width = self.group.size, sum(p.nbytes for p in self._weights.values())
        dense = self.inner_steps * (2 * (ranks - 1) * width // ranks)
        return dataclasses.replace(super().stats(), bytes_dense=dense)

    # --- checkpoint ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State's, and all that differs from rank to rank: weights, buffers, the optimiser.

        Between exchanges no other rank has these: a checkpoint of rank 0's model is not enough.
        """
        return super().state_dict() | {
            "weights": _copies(self._weights),
            "local": {
                "inner_steps": self.inner_steps,
                "reference": _copies(self._reference),
                "velocity": _copies(self._velocity),
                "buffers": _copies(dict(self.model.named_buffers())),
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
                "optimizer_kind": type(self.optimizer).__name__,
                "keep_unsent": self.keep_unsent,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, weights and optimiser included."""
        super().load_state_dict(state)
        self._take(state)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """State's, and the rest."""
        super().restore(saved)
        self._take(saved)

    def check_more(self, saved: Mapping[str, Any]) -> None:
        """Raises StateError unless weights, buffers, optimiser and rule are of this model."""
        local = saved.get("local")
        if not isinstance(local, Mapping):
            raise StateError("this state is not of local_steps: it has no entry 'local'")
        missing = [k for k in ("inner_steps", "reference", "velocity", "buffers") if k not in local]
        if missing or "weights" not in saved:
            raise StateError(f"the state has no entry {(missing or ['weights'])[0]!r}")
        check_count("inner_steps", local["inner_steps"])
        if bool(local["velocity"]) != bool(self._velocity):
            raise StateError(
                f"the state was saved {'with' if local['velocity'] else 'without'} outer "
                f"momentum, here outer_momentum is {self.outer_momentum:g}: give the same rule"
            )
        if local.get("keep_unsent", self.keep_unsent) != self.keep_unsent:
            raise StateError(
                f"the state was saved with keep_unsent={local['keep_unsent']}, this is "
                f"keep_unsent={self.keep_unsent}: give the same, or what is kept counts twice"
            )
        for what, found, here in (
            ("weights", saved["weights"], self._weights),
            ("reference", local["reference"], self._reference),
            ("velocity", local["velocity"], self._velocity),
            ("buffers", local["buffers"], dict(self.model.named_buffers())),
        ):
            check_alike(what, found, here)
        check_optimizer(local.get("optimizer"), self.optimizer, local.get("optimizer_kind"))

    @torch.no_grad()
    def _take(self, saved: Mapping[str, Any]) -> None:
        local = saved["local"]
        self.inner_steps = local["inner_steps"]
        buffers = dict(self.model.named_buffers())
        for target, source in (
            (self._weights, saved["weights"]),
            (self._reference, local["reference"]),
            (self._velocity, local["velocity"]),
            (buffers, local["buffers"]),
        ):
            for name, tensor in target.items():
                tensor.copy_(source[name])
        self.optimizer.load_state_dict(local["optimizer"])


def local_steps(
    model: nn.Module,
    optimizer: Optimizer,
    every: int,
    *,
    outer: str = "nesterov",
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    keep_unsent: bool = False,
    group: Ranks = None,
    config: Config | None = None,
    **fields: Any,
) -> LocalSteps:
    """Exchange weights every `every` steps instead of gradients at each: DiLoCo, SparseLoCo.

        local = gradwire.local_steps(model, optimizer, every=30, density=0.05)
        for batch in batches:
            optimizer.zero_grad(); loss(model, batch).backward(); optimizer.step()
            local.step()

    Every rank trains the plain `model` with its own `optimizer`, any; after `every` steps the
    difference of weights is compressed with error feedback and averaged, and is the gradient of
    an outer step: `outer` is "nesterov" (lr 1, momentum 0.5) or "average" (the mean, as far as
    it was sent), `outer_lr` and `outer_momentum` change these. With `keep_unsent` a rank's weights
    keep what it has not sent yet: ranks then differ after an exchange too, `shared_weights()` are
    what they agree on, and `flush()` before the last exchange makes them equal. The fields are
    Config's; method
    "chunked", density 0.05, values "int4" and indices "packed" are what this function changes in
    them. A collective call: ranks start from rank 0's weights. `group` are the ranks: a process
    group, or a virtual worker's. Takes 8 bytes a parameter, and 4 more with outer momentum.
    """
    note_torch()
    refuse_for_local_steps(model, optimizer)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(f"every must be a whole number of at least 1, got {every!r}")
    if outer not in OUTER:
        raise unknown("outer", outer, OUTER)
    given = (outer_lr, outer_momentum)
    lr, momentum = (d if g is None else g for g, d in zip(given, OUTER[outer], strict=True))
    if not 0 < lr <= 10:
        raise ConfigError(f"outer_lr must be in (0, 10], got {lr!r}; 1 applies the mean as it is")
    if not 0 <= momentum < 1:
        raise ConfigError(f"outer_momentum must be in [0, 1), got {momentum!r}")
    if outer == "average" and momentum:
        raise ConfigError(f"outer='average' has no momentum, got {momentum!r}: outer='nesterov'")
    config = configure(config, fields if config else DEFAULTS | fields)
    return LocalSteps(
        model,
        optimizer,
        config,
        every=every,
        rule=(float(lr), float(momentum)),
        keep_unsent=bool(keep_unsent),
        group=group,
    )


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().cpu() for name, tensor in tensors.items()}
