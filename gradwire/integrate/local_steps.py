"""local_steps: exchange weights every few steps, for links too slow to exchange at every step."""

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
from gradwire.integrate.handshake import handshake
from gradwire.integrate.loop import average, slots_of
from gradwire.integrate.refuse import refuse_for_local_steps
from gradwire.integrate.versions import note_torch
from gradwire.ranks.group import Group, uncounted
from gradwire.state.names import parameter_names
from gradwire.state.saved.check import check_alike, check_count, check_optimizer
from gradwire.state.state import State
from gradwire.state.stats import Stats

_OUTER = {"nesterov": (1.0, 0.5), "average": (1.0, 0.0)}
"""Outer learning rate and momentum. DiLoCo (Douillard et al. 2023) uses 0.7 and 0.9 with Nesterov
and sends differences whole. Here entries arrive late, which already acts like momentum."""

_DEFAULTS = {"method": "chunked", "density": 0.05, "values": "int4", "indices": "packed"}
"""Fields of Config for which local steps have other defaults."""

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

    SparseLoCo (Sarfi et al. 2025) differs in two points. Its residual decays by 0.999 per round;
    here the residual does not decay, because the law would not hold. Its mean is over the ranks
    that sent an entry; here the mean is over all ranks.
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
        group: _Ranks = None,
    ) -> None:
        super().__init__(config, model=model)
        self.every, self.keep_unsent = every, keep_unsent
        self.outer_lr, self.outer_momentum = rule
        self.model, self.optimizer = model, optimizer
        self.inner_steps = 0
        """Inner steps so far; `steps` counts the exchanges."""
        names = parameter_names(model)
        self._weights = {names[id(p)]: p for p in model.parameters() if id(p) in names}
        self._join_ranks(group)
        self._reference = {name: p.detach().float().clone() for name, p in self._weights.items()}
        self._velocity: dict[str, Tensor] = {}
        if self.outer_momentum:
            self._velocity = {name: torch.zeros_like(x) for name, x in self._reference.items()}

    @torch.no_grad()
    def _join_ranks(self, group: _Ranks) -> None:
        """Compare settings with the other ranks, and take over rank 0's weights.

        This is a collective call.
        """
        device = next(iter(self._weights.values())).device
        # Differences of weights are fp32 for every dtype of weights.
        slots = slots_of(
            {
                name: torch.empty(p.shape, dtype=torch.float32, device="meta")
                for name, p in self._weights.items()
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
        self.inner_steps += 1
        if self.inner_steps % self.every == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange now; afterwards all ranks have the same weights, unless `keep_unsent` is set.

        This is a collective call.
        """
        if not self.group.on_stream:
            self.group.agree("local_steps", steps=self.steps, inner_steps=self.inner_steps)
        starts = self._start_weights()
        differences = {n: starts[n].float() - w.float() for n, w in self._weights.items()}
        for name, weight in self._weights.items():
            # A drift watch compares the parameters, and only x is equal on all ranks.
            weight.copy_(self._reference[name])
        average(differences, self)
        skipped = self.was_skipped()
        for name, update in differences.items():
            self._outer_step(name, torch.where(skipped, 0, update), skipped)
        for name, start in self._start_weights().items():
            self._weights[name].copy_(start)

    def _start_weights(self) -> dict[str, Tensor]:
        """Return the weights with which a round begins, in their dtype."""
        starts = self._reference
        if self.keep_unsent:
            starts = dict(starts)
            for bundle in self.bundles:
                residual = bundle.residual(self.was_skipped())
                for slot in bundle.slots:
                    starts[slot.name] = starts[slot.name] - bundle.view(residual, slot)
        return {name: starts[name].to(w.dtype) for name, w in self._weights.items()}

    def _outer_step(self, name: str, update: Tensor, skipped: Tensor) -> None:
        """Take the outer step of one parameter: change m and x in place."""
        if self._velocity:
            velocity = self._velocity[name]
            new_velocity = self.outer_momentum * velocity + update
            update = torch.where(skipped, 0, update + self.outer_momentum * new_velocity)
            velocity.copy_(torch.where(skipped, velocity, new_velocity))
        self._reference[name].sub_(update, alpha=self.outer_lr)

    def shared_weights(self) -> dict[str, Tensor]:
        """Return copies of x in fp32: the weights that all ranks had after the last exchange."""
        return {name: x.clone() for name, x in self._reference.items()}

    def skip_step(self) -> None:
        """Raise StateError, because the weights have moved already."""
        raise StateError("skip_step: an exchange of weights cannot be taken back")

    def stats(self) -> Stats:
        """Return `Stats`, in which bytes_dense counts a dense all-reduce after every inner step."""
        ranks, width = self.group.size, sum(p.nbytes for p in self._weights.values())
        dense = self.inner_steps * (2 * (ranks - 1) * width // ranks)
        return dataclasses.replace(super().stats(), bytes_dense=dense)

    # --- checkpoint ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return State's part, and this rank's weights, buffers and optimiser.

        Between exchanges these differ from rank to rank, so rank 0's model alone is not enough.
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

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a checked state, weights and optimiser included."""
        super().restore(saved)
        self._load_local(saved)

    def check_more(self, saved: Mapping[str, Any]) -> None:
        """Raise StateError unless weights, buffers, optimiser and rule fit this model."""
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
        for kind, in_state, in_model in (
            ("weights", saved["weights"], self._weights),
            ("reference", local["reference"], self._reference),
            ("velocity", local["velocity"], self._velocity),
            ("buffers", local["buffers"], dict(self.model.named_buffers())),
        ):
            check_alike(kind, in_state, in_model)
        check_optimizer(local.get("optimizer"), self.optimizer, local.get("optimizer_kind"))

    @torch.no_grad()
    def _load_local(self, saved: Mapping[str, Any]) -> None:
        """Copy weights, x, m, buffers and the optimiser's state from a checked state."""
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
    group: _Ranks = None,
    config: Config | None = None,
    **fields: Any,
) -> LocalSteps:
    """Exchange weights every `every` steps instead of gradients at each: DiLoCo, SparseLoCo.

        local = gradwire.local_steps(model, optimizer, every=30, density=0.05)
        for batch in batches:
            optimizer.zero_grad(); loss(model, batch).backward(); optimizer.step()
            local.step()

    Every rank trains the plain `model` with any `optimizer` of its own. After `every` steps the
    difference of weights is compressed with error feedback and averaged. The mean is the gradient
    of an outer step. This is a collective call: ranks start from rank 0's weights. It takes 8 bytes
    per parameter, and 4 more with outer momentum.

    outer: "nesterov" (lr 1, momentum 0.5), or "average" (lr 1, no momentum).
    outer_lr, outer_momentum: replace these two numbers.
    keep_unsent: a rank's weights keep the differences that the rank has not sent yet. _Ranks then
    differ after an exchange too. `shared_weights()` returns the weights that all ranks share, and
    `flush()` before the last exchange makes all ranks equal.
    group: the ranks, as a process group or a virtual worker's group.
    fields: fields of Config. The defaults here are method "chunked", density 0.05, values "int4"
    and indices "packed".
    """
    note_torch()
    refuse_for_local_steps(model, optimizer)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(f"every must be a whole number of at least 1, got {every!r}")
    if outer not in _OUTER:
        raise unknown("outer", outer, _OUTER)
    default_lr, default_momentum = _OUTER[outer]
    lr = default_lr if outer_lr is None else outer_lr
    momentum = default_momentum if outer_momentum is None else outer_momentum
    if not 0 < lr <= 10:
        raise ConfigError(f"outer_lr must be in (0, 10], got {lr!r}; 1 applies the mean as it is")
    if not 0 <= momentum < 1:
        raise ConfigError(f"outer_momentum must be in [0, 1), got {momentum!r}")
    if outer == "average" and momentum:
        raise ConfigError(f"outer='average' has no momentum, got {momentum!r}: outer='nesterov'")
    config = configure(config, fields if config else _DEFAULTS | fields)
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
