"""Roles of parameters: Muon for hidden matrices, AdamW for the rest, and the matrices in each."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradwire.errors import ConfigError
from gradwire.state.names import plain_name, unwrapped

Cut = tuple[int, tuple[int, ...]]
"""A dimension, and the sizes of the parts along it."""

_HEADS = {"lm_head", "head", "unembed", "embed_out"}
_THIRDS = {"qkv", "qkv_proj", "Wqkv", "to_qkv", "c_attn", "in_proj_weight", "in_proj"}
"""Names of weights that hold q, k and v one below the other."""
_HALVES = {"gate_up_proj", "up_gate_proj"}
_FUSED = _THIRDS | _HALVES | {"query_key_value", "kv_proj", "Wi"}
"""Names of weights that hold several matrices; without a cut, these are said to be left whole."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Role:
    """Optimiser of a parameter, and the reason.

    rule: "muon" or "adamw". kind: the kind of parameter, in words. cut: the matrices inside it.
    """

    rule: str
    kind: str
    cut: Cut | None = None


Split = int | Sequence[int]


class Roles:
    """The role of each parameter of a model that needs a gradient.

    muon, adamw: patterns of names, which win. split: by pattern, the number of equal matrices that
    a weight holds along its outputs, or their sizes; 1 leaves it whole.
    """

    def __init__(
        self,
        model: nn.Module,
        muon: Sequence[str] = (),
        adamw: Sequence[str] = (),
        split: Mapping[str, Split] | None = None,
    ) -> None:
        model = unwrapped(model)
        self._muon, self._adamw, self._split = muon, adamw, dict(split or {})
        self.parameters = {
            plain_name(name): p for name, p in model.named_parameters() if p.requires_grad
        }
        self._homes = {
            id(p): (module, name)
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False)
        }
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        self._embeddings = {id(m.weight) for m in tables}
        self._head = _last_head([m for m in model.modules() if isinstance(m, nn.Linear)], tables)
        self._check_patterns()
        self.roles = {name: self._role(name, p) for name, p in self.parameters.items()}
        self.left_whole = [name for name, role in self.roles.items() if self._is_fused(name, role)]
        """Weights that seem to hold several matrices, and that no cut is known for."""

    def _check_patterns(self) -> None:
        for option, patterns in (
            ("muon", self._muon),
            ("adamw", self._adamw),
            ("split", self._split),
        ):
            if isinstance(patterns, str):
                raise ConfigError(f"{option} must be several patterns, such as [{patterns!r}]")
            for pattern in patterns:
                if not any(fnmatch.fnmatchcase(name, pattern) for name in self.parameters):
                    near = ", ".join(list(self.parameters)[:4])
                    raise ConfigError(
                        f"{option}={pattern!r} matches no parameter. Names look like: {near}"
                    )
        for name in self.parameters:
            if _matches(name, self._muon) and _matches(name, self._adamw):
                raise ConfigError(f"{name} is named by muon and by adamw: name it in one of them")

    def _role(self, name: str, parameter: Tensor) -> Role:
        if _matches(name, self._adamw):
            return Role("adamw", "named in adamw")
        forced = _matches(name, self._muon)
        kind = "" if forced else self._kind(name, parameter)
        if kind:
            return Role("adamw", kind)
        if parameter.dim() not in (2, 3):
            raise ConfigError(
                f"{name} has shape {tuple(parameter.shape)}: muon takes matrices, and stacks of "
                f"them with 3 dimensions"
            )
        kind = "named in muon" if forced else "hidden matrices"
        if parameter.dim() == 3:
            kind = "stacks of matrices"
        return Role("muon", kind, self._cut(name, parameter))

    def _kind(self, name: str, parameter: Tensor) -> str:
        """Return the kind of a parameter for AdamW; an empty string for a hidden matrix."""
        module, own = self._homes[id(parameter)]
        words = name.split(".")
        if parameter.dim() < 2 or sum(size > 1 for size in parameter.shape) < 2:
            return "norms and biases"
        if id(parameter) in self._embeddings:
            return "embeddings"
        if parameter is self._head or _HEADS & set(words):
            return "head"
        if isinstance(module, _CONVOLUTIONS) or parameter.dim() > 3:
            return "convolutions"
        is_table = not isinstance(module, nn.Linear) and "emb" in own.lower()
        return "embeddings" if is_table else ""

    def _cut(self, name: str, parameter: Tensor) -> Cut | None:
        """Return the matrices inside a weight, as given or as its name and shape tell."""
        for pattern, parts in self._split.items():
            if fnmatch.fnmatchcase(name, pattern):
                return self._given_cut(name, parameter, parts)
        if parameter.dim() != 2:
            return None
        words = set(name.split(".")[-2:])
        for names, count in ((_THIRDS, 3), (_HALVES, 2)):
            if not words & names:
                continue
            if count == 2:
                return self._given_cut(name, parameter, 2)
            for dim in (0, 1):
                if parameter.shape[dim] == count * parameter.shape[1 - dim]:
                    return dim, (parameter.shape[1 - dim],) * count
        return None

    def _given_cut(self, name: str, parameter: Tensor, parts: Split) -> Cut | None:
        if parts == 1:
            return None
        if parameter.dim() != 2:
            raise ConfigError(
                f"split: {name} has 3 dimensions, a matrix for each of the first; it takes 1 only"
            )
        dim = 1 if self._is_transposed(parameter) else 0
        size = parameter.shape[dim]
        if isinstance(parts, int):
            if parts < 1 or size % parts:
                raise ConfigError(f"split: {name} has {size} outputs, not {parts} equal parts")
            sizes = (size // parts,) * parts
        else:
            sizes = tuple(parts)
        if sum(sizes) != size or min(sizes) < 1:
            raise ConfigError(
                f"split: {name} has {size} outputs, not {' + '.join(map(str, sizes))}"
            )
        return (dim, sizes) if len(sizes) > 1 else None

    def _is_transposed(self, parameter: Tensor) -> bool:
        """Return True for transformers' Conv1D, which has its outputs in the second dimension."""
        return type(self._homes[id(parameter)][0]).__name__ == "Conv1D"

    def _is_fused(self, name: str, role: Role) -> bool:
        words = set(name.split(".")[-2:])
        is_given = _matches(name, self._split)
        return role.rule == "muon" and not role.cut and bool(words & _FUSED) and not is_given

    def groups(self) -> Iterator[tuple[Role, list[tuple[str, nn.Parameter]]]]:
        """Yield each role with the named parameters that have it; Muon's come first."""
        for rule in ("muon", "adamw"):
            for role in dict.fromkeys(self.roles.values()):
                if role.rule == rule:
                    found = [(n, p) for n, p in self.parameters.items() if self.roles[n] == role]
                    yield role, found


def _last_head(linears: Sequence[nn.Linear], tables: Sequence[nn.Module]) -> Tensor | None:
    """Return the last Linear's weight if it has an output for every row of an embedding."""
    rows = {table.num_embeddings for table in tables}
    if not linears or linears[-1].out_features not in rows:
        return None
    return linears[-1].weight


def _matches(name: str, patterns: "Sequence[str] | Mapping[str, Split]") -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
