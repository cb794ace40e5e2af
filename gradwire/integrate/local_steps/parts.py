"""Parts: the part of a model's weights that this rank exchanges; all of them in a plain model."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradwire.errors import ConfigError, GradwireError
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.group import Group, uncounted
from gradwire.ranks.together import gather_words
from gradwire.state.drift import digest
from gradwire.state.names import parameter_names, unwrapped

if TYPE_CHECKING:
    from gradwire.state.saved.cuts import Cut


class Parts:
    """The weights of a plain model, of which every rank exchanges all.

    An island is a few ranks that hold one copy of the model together. Its ranks are in `axes`, a
    group along each axis of the island. A plain model's island is one rank.
    """

    kind = "plain"
    """The kind of island, which all ranks have alike."""
    puts_together = False
    """True: `put` of many parts is one message inside the island."""
    axes: Sequence[DistributedGroup] = ()
    place, places = 0, 1
    """The number of this rank in its island, and the number of ranks there."""
    whole: frozenset[str] = frozenset()
    """Names of the parameters of which several ranks of the island hold one and the same part."""

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        names = parameter_names(model)
        self.parameters: dict[str, Tensor] = {
            names[id(p)]: p for p in model.parameters() if id(p) in names
        }
        """The model's parameters by name."""

    @property
    def device(self) -> torch.device:
        """The device on which weights are exchanged."""
        return next(iter(self.read().values())).device

    def sizes(self) -> dict[str, int]:
        """Return the entries of each whole parameter, alike on all ranks of an island."""
        return {name: p.numel() for name, p in self.parameters.items()}

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return this rank's part of these weights, which may be memory of the model."""
        return {name: self.held(name) for name in (self.parameters if names is None else names)}

    def held(self, name: str) -> Tensor:
        """Return this rank's part of one parameter."""
        return self.parameters[name].detach()

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Write parts into the model. All ranks of an island call it together."""
        for name, value in values.items():
            self.held(name).copy_(value)

    def join(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return these parts as they stand for whole parameters. The island calls it together."""
        return dict(values)

    def memory(self) -> dict[str, Tensor]:
        """Return the tensors that hold weights and buffers on this rank, by name."""
        return self.read() | dict(self.model.named_buffers())

    def refresh(self) -> None:
        """Make the model use the parts that were put; `memory` may have been changed too."""

    @torch.no_grad()
    def spread(self, group: Group) -> None:
        """Take over the weights and buffers of the first rank of `group`, frozen ones too.

        Nothing is sent where all ranks have them already: a slow link would take minutes.
        """
        tensors = self._floating()
        if self._differ(tensors, group):
            for tensor in tensors:
                tensor.copy_(_from_first(tensor, group))

    def _differ(self, tensors: Sequence[Tensor], group: Group) -> bool:
        """Return True unless all ranks have the same bits; alike on all ranks of the island."""
        if not tensors:
            return False
        own = digest(torch.stack([digest(tensor).to(self.device) for tensor in tensors]))
        rows = group.all_gather(own.reshape(1)).flatten()
        with contextlib.ExitStack() as stack:
            for axis in self.axes:
                stack.enter_context(uncounted(axis))
            return bool(self.any_failed((rows != rows[0]).any()))

    def _floating(self) -> list[Tensor]:
        """Return the weights and buffers of this rank that have digits."""
        return [t for t in self._everything() if t.is_floating_point() and t.numel()]

    def _everything(self) -> Iterable[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def cuts(self) -> "dict[str, Cut]":
        """Return by name the way in which the ranks of an island cut each parameter."""
        raise NotImplementedError("a plain model is not cut")

    # --- the ranks of the island ------------------------------------------------------------------

    def any_failed(self, failed: Tensor) -> Tensor:
        """Return True (0-d) if `failed` is True on some rank of the island. A collective call."""
        if not self.axes:
            return failed
        count = failed.to(torch.float32).reshape(1)
        for axis in self.axes:
            count = axis.all_reduce(count)
        return count[0] > 0

    def agree(self, operation: str, **fields: float) -> None:
        """Raise on every rank of the island unless all are at the same place. A collective call."""
        for axis in self.axes:
            if not axis.on_stream:
                with uncounted(axis):
                    axis.agree(operation, **fields)

    def raise_together(self, failure: GradwireError | None) -> None:
        """Raise on every rank of the island when one of them failed. A collective call."""
        texts = gather_everywhere(self.axes, "" if failure is None else str(failure), self.device)
        if first := next((text for text in texts if text), ""):
            raise failure or ConfigError(f"another rank of the island: {first}")

    def give_up(self) -> None:
        """Release the ranks of the island that wait for this one, after an error."""
        for axis in self.axes:
            axis.give_up()

    def leave(self) -> None:
        """Give the communicators of the island back."""
        for axis in self.axes:
            axis.leave(None)


def gather_everywhere(groups: Sequence[Group], value: Any, device: torch.device) -> list[Any]:
    """Return `value` of all ranks that the groups reach, one group after the other."""
    values = [value]
    for group in groups:
        with uncounted(group):
            values = [v for row in gather_words(group, values, device) for v in row]
    return values


def _from_first(tensor: Tensor, group: Group) -> Tensor:
    """Return the first rank's tensor. A sum with zeros, because a Group has no broadcast."""
    term = tensor.detach().clone() if group.rank == 0 else torch.zeros_like(tensor)
    return group.all_reduce(term.contiguous())
