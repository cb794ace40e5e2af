"""muon: one optimiser for a transformer, with Muon for hidden matrices and AdamW for the rest."""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw as adamw_step

from gradwire.errors import ConfigError, StateError
from gradwire.optim.newton_schulz import batches, orthogonalise
from gradwire.optim.roles import Cut, Roles, Split
from gradwire.optim.shards import (
    can_share,
    cut_out,
    deal_back,
    deal_matrices,
    gather_whole,
    needs_gathering,
)
from gradwire.types import local_of

_FUSED_ON = ("cuda", "cpu")
"""Devices on which torch has AdamW as one kernel."""


def muon(
    model: nn.Module,
    lr: float = 0.004,
    weight_decay: float = 0.1,
    *,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    muon: Sequence[str] = (),
    adamw: Sequence[str] = (),
    split: Mapping[str, Split] | None = None,
) -> "MuonAdamW":
    """Return an optimiser for all parameters of `model` that need a gradient.

        optimizer = gradwire.optim.muon(model, lr=0.004, weight_decay=0.1)
        print(optimizer)  # shows which parameter goes where

    Hidden matrices have Muon (Jordan et al. 2024). Embeddings, the head, norms, biases and
    convolutions have AdamW. Muon's updates have the size of AdamW's, so that one learning rate
    serves both. Weight decay is decoupled, and norms and biases have none.

    The head is the last Linear if it has an output for every row of an embedding, or is named
    lm_head, head, unembed or embed_out.

    momentum: Muon's, in Nesterov's form. betas, eps: AdamW's.
    muon, adamw: patterns of parameter names that go there whatever they are.
    split: by pattern, the number of equal matrices that a weight holds along its outputs, or their
    sizes: {"*.qkv.weight": (768, 256, 256)}. 1 leaves a weight whole. Weights named as q, k and v
    in one (c_attn, qkv, in_proj_weight) of three equal squares are split without being named, and
    so are gate_up_proj. A weight with 3 dimensions is a matrix for each of the first.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"muon needs a torch.nn.Module, got {type(model).__name__}")
    for name, value, limit in (
        ("lr", lr, math.inf),
        ("weight_decay", weight_decay, math.inf),
        ("momentum", momentum, 1),
    ):
        if not isinstance(value, int | float) or not 0 <= value < limit:
            raise ConfigError(f"muon: {name} must be in [0, {limit:g}), got {value!r}")
    roles = Roles(model, muon, adamw, split)
    groups = []
    for role, parameters in roles.groups():
        group: dict[str, Any] = {"params": parameters, "rule": role.rule, "kind": role.kind}
        if role.rule == "muon":
            group |= {"momentum": momentum, "cut": role.cut}
        else:
            # torch puts a loaded count of steps beside its parameter if the group is fused.
            fused = all(p.device.type in _FUSED_ON for _, p in parameters)
            group |= {"betas": betas, "eps": eps, "fused": fused}
            if role.kind == "norms and biases":
                group["weight_decay"] = 0.0
        groups.append(group)
    if not any(group["rule"] == "muon" for group in groups):
        raise ConfigError("muon found no hidden matrix in this model: use torch.optim.AdamW")
    if roles.left_whole:
        first = roles.left_whole[0]
        is_stack = roles.parameters[first].dim() == 3
        warnings.warn(
            f"muon: {_collapse(roles.left_whole)} may hold several matrices and is one to Muon"
            f"{' for each of the first dimension' if is_stack else ''}: give "
            f"split={{{first!r}: {'1}' if is_stack else 'sizes}, or 1'} to leave it whole",
            stacklevel=2,
        )
    return MuonAdamW(groups, lr, weight_decay)


class MuonAdamW(Optimizer):
    """The optimiser that `muon` makes: a parameter group per rule and kind of parameter.

    g: the gradient. Muon, with NS for five Newton-Schulz steps in bf16:

        m = momentum m + (1 - momentum) g,   o = NS((1 - momentum) g + momentum m)
        w = w - lr weight_decay w - 0.2 sqrt(max(rows, columns)) lr o

    This is torch.optim.Muon with adjust_lr_fn="match_rms_adamw", for all matrices of one shape at
    once. State and groups are plain, so schedulers, checkpoints and GradScaler work as with torch.

    Of a model in fully_shard every rank keeps its shard of the state. NS needs whole matrices, so
    the ranks of an island deal them out in bf16: each runs NS on its share, and deals it back.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters that come later: their rule follows from the model as a whole."""
        if "rule" not in param_group:
            raise ConfigError(
                "muon takes no more parameters: make another one with the whole model, as "
                "gradwire.optim.muon(model)"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; raise StateError for one of another model."""
        _check_layout(self, state_dict)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the present gradients; parameters without one stay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if p.grad.is_sparse:
                    raise ConfigError("muon takes no sparse gradients: use Embedding(sparse=False)")
            if parameters:
                (self._muon_step if group["rule"] == "muon" else self._adamw_step)(
                    parameters, group
                )
        return loss

    def _muon_step(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        lr, beta, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        moments: list[Tensor] = []
        sharded: list[Tensor] = []
        for p in parameters:
            assert p.grad is not None, "step leaves these out"
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            moment, gradient = local_of(self.state[p]["momentum_buffer"]), local_of(p.grad)
            moment.lerp_(gradient, 1 - beta)
            local_of(p).mul_(1 - lr * decay)
            if needs_gathering(p):
                sharded.append(p)
                continue
            for matrices, tensor in (
                (weights, local_of(p)),
                (gradients, gradient),
                (moments, moment),
            ):
                matrices += _matrices(tensor, group["cut"])
        for places in batches(weights):
            first = weights[places[0]]
            size = (len(places), *first.shape)
            stacked = torch.empty(size, dtype=torch.bfloat16, device=first.device)
            for i, into in zip(places, stacked, strict=True):
                # Nesterov's momentum, rounded on its way.
                torch.lerp(gradients[i], moments[i], beta, out=into)
            for i, update in zip(places, orthogonalise(stacked), strict=True):
                weights[i].add_(update, alpha=-_rate(first, lr))
        for places in batches(sharded):
            self._sharded_step([sharded[i] for i in places], group)

    def _sharded_step(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        """Take Muon's step with shards of parameters of one shape, which travel in bf16.

        Every rank of an island orthogonalises its share of them. Where they are cut along several
        axes, every rank gathers all.
        """
        shards = []
        for p in parameters:
            assert p.grad is not None, "step leaves these out"
            gradient, moment = local_of(p.grad), local_of(self.state[p]["momentum_buffer"])
            mine = torch.empty_like(gradient, dtype=torch.bfloat16)
            torch.lerp(gradient, moment, group["momentum"], out=mine)
            shards.append(mine)
        first, cut = parameters[0], group["cut"]
        alike = _matrices(torch.empty(first.shape, dtype=torch.float32, device="meta"), cut)
        largest = max(_rate(matrix, 1.0) for matrix in alike)
        if can_share(first):
            updates = _orthogonal_parts(deal_matrices(shards, first), cut, 1 / largest)
            moves: Sequence[Tensor] = deal_back(updates, len(parameters), first)
        else:
            whole = torch.stack([gather_whole(mine, first) for mine in shards])
            moves = [cut_out(move, first) for move in _orthogonal_parts(whole, cut, 1 / largest)]
        for p, move in zip(parameters, moves, strict=True):
            local_of(p).add_(move, alpha=-largest * float(group["lr"]))

    def _adamw_step(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                place = p.device if group["fused"] else None
                self.state[p] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=place),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }
        states = [self.state[p] for p in parameters]
        adamw_step(
            [local_of(p) for p in parameters],
            [local_of(p.grad) for p in parameters if p.grad is not None],
            [local_of(state["exp_avg"]) for state in states],
            [local_of(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def __repr__(self) -> str:
        """Return a line per kind and shape of parameters, with its rule."""
        lines = [f"{type(self).__name__}(lr={self.param_groups[0]['lr']:g})"]
        for group in self.param_groups:
            rule = "Muon" if group["rule"] == "muon" else "AdamW"
            parts = f", each cut into {_describe(group['cut'])}" if group.get("cut") else ""
            decay = "" if group["weight_decay"] else ", no weight decay"
            lines.append(f"  {rule}, {group['kind']}{parts}{decay}:")
            alike: dict[tuple[str, tuple[int, ...]], int] = {}
            for name, p in zip(group["param_names"], group["params"], strict=True):
                key = re.sub(r"\b\d+\b", "*", name), tuple(p.shape)
                alike[key] = alike.get(key, 0) + 1
            lines += [f"    {n} x {name} {list(shape)}" for (name, shape), n in alike.items()]
        return "\n".join(lines)


def _orthogonal_parts(whole: Tensor, cut: Cut | None, scale: float) -> Tensor:
    """Return stacked tensors with each of their matrices orthogonalised, times its rate at `scale`.

    The largest rate is 1, and multiplies without rounding.
    """
    moves = torch.empty_like(whole)
    matrices = [matrix for tensor in whole for matrix in _matrices(tensor, cut)]
    parts = [part for tensor in moves for part in _matrices(tensor, cut)]
    for places in batches(matrices):
        updates = orthogonalise(torch.stack([matrices[i] for i in places]))
        for i, update in zip(places, updates, strict=True):
            torch.mul(update, _rate(update, scale), out=parts[i])
    return moves


def _rate(matrix: Tensor, lr: float) -> float:
    """Return the learning rate with which an orthogonal matrix has the size of AdamW's updates."""
    return 0.2 * math.sqrt(max(matrix.shape)) * lr


def _check_layout(optimizer: MuonAdamW, saved: Mapping[str, Any]) -> None:
    """Raise StateError unless rules, parameters and shapes are those of the optimiser."""
    mine = [(g["rule"], len(g["params"])) for g in optimizer.param_groups]
    theirs = [(g.get("rule"), len(g["params"])) for g in saved["param_groups"]]
    if mine != theirs:
        raise StateError(
            f"muon: the saved state has groups {theirs} of (rule, parameters), this model's are "
            f"{mine}: it is of another model or optimiser"
        )
    numbers = [number for g in saved["param_groups"] for number in g["params"]]
    parameters = [
        pair
        for g in optimizer.param_groups
        for pair in zip(g["param_names"], g["params"], strict=True)
    ]
    for number, (name, p) in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if key != "step" and value.shape != p.shape:
                raise StateError(
                    f"muon: the saved {key} of {name} has shape {tuple(value.shape)}, the "
                    f"parameter has {tuple(p.shape)}: it is of another model"
                )


def _matrices(tensor: Tensor, cut: Cut | None) -> Sequence[Tensor]:
    """Return views of the matrices inside a weight, its gradient or its momentum."""
    if tensor.dim() == 3:
        return tensor.unbind()
    return (tensor,) if cut is None else tensor.split(list(cut[1]), dim=cut[0])


def _describe(cut: Cut) -> str:
    return f"{' + '.join(map(str, cut[1]))} {('rows', 'columns')[cut[0]]}"


def _collapse(names: Sequence[str]) -> str:
    """Return the names with their numbers as stars, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
