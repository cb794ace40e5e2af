"""The path of one bundle through one step. Read this first.

gradient -> accumulate -> compress -> encode -> exchange -> decode -> averaged gradient
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from gradwire import encode as messages
from gradwire.accumulate.bundle import Bundle
from gradwire.accumulate.momentum import to_mask
from gradwire.compress.method import BoundMethod
from gradwire.config import Config
from gradwire.encode.message import Message
from gradwire.encode.noise import next_noise
from gradwire.exchange import EXCHANGES, Exchange, Outcome
from gradwire.kernels.dispatch import one_version
from gradwire.kernels.scan import Piece
from gradwire.kernels.side_stream import Target
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.state.choice import Choice
from gradwire.types import Entries, Scan, Slot, Sparse, empty_sparse

_FP16 = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Step:
    """One bundle in one step, and all that its stages need to know.

    pieces: its gradient. choice: how many entries, by which exchange. skipped: True (0-d) if the
    optimiser did not take the last step. into: the place that the mean is wanted in.
    scale: the loss scale of gradient and mean. unused: the parameters that no rank used.
    """

    bundle: Bundle
    pieces: Sequence[Piece]
    choice: Choice
    config: Config
    group: Group
    skipped: Tensor
    into: Target
    scale: Tensor | None = None
    unused: Sequence[Slot] = ()

    @property
    def method(self) -> BoundMethod:
        return self.config.bound_method

    @cached_property
    def scheme(self) -> Exchange:
        return EXCHANGES[self.choice.exchange]

    @cached_property
    def mean(self) -> Target:
        """The target of an exchange that fills one: `into`, unless the mean changes on its way."""
        plain = self.bundle.dtype == torch.float32 and self.scale is None and not self.bundle.masks
        return self.into if plain else Target(self.bundle.size, self.bundle.u.device)


def average(step: Step) -> None:
    """Put the mean over all ranks of what they send of u into `step.into`, and keep the rest."""
    with one_version():
        scan = accumulate(step)
        sparse = compress(step, scan)
        message = encode(step, sparse, scan)
        outcome = exchange(step, message)
        decode(step, sparse, outcome)


def accumulate(step: Step) -> Scan:
    """u = gradient + residual; with momentum correction, momentum + residual."""
    bundle, choice = step.bundle, step.choice
    with stage("accumulate"):
        if not step.scheme.owns_parts:
            bundle.fold_owned(step.skipped)
        if choice.selects:
            step.method.prefetch(bundle.u, choice.k, bundle.memory)
        unscale = None if step.scale is None else step.scale.reciprocal()
        scan = bundle.accumulate(
            step.pieces, choice.block, step.skipped, unscale, step.unused, choice.maxima16
        )
        if step.scheme.fills:
            # Zeroed beside the stages that follow, because the mean is zero nearly everywhere.
            step.mean.clear()
    return scan


def compress(step: Step, scan: Scan) -> Sparse | None:
    """Choose the entries that this rank sends; None when all of u is sent."""
    bundle, choice = step.bundle, step.choice
    if choice.reason:
        return None
    with stage("compress"):
        if not choice.selects:
            # The exchange looks at u itself. The message only makes room for k entries.
            return empty_sparse(choice.k, bundle.u)
        if step.method.varies:
            bundle.memory.longest = partial(longest_count, bundle, step.group)
        return step.method.choose(bundle.u, choice.k, bundle.memory, scan)


def longest_count(bundle: Bundle, group: Group, count: Tensor) -> int:
    """Return the largest `count` (0-d) of all ranks, at least 1. The host waits for it."""
    bundle.tally.length_exchanges += 1
    counts = group.all_gather(count.view(1).long())
    return max(1, int(counts.max()))


def encode(step: Step, sparse: Sparse | None, scan: Scan) -> Message:
    """Write the message, with values rounded as the config says."""
    bundle, config = step.bundle, step.config
    with stage("encode"):
        stochastic = sparse is not None and config.rounding == "stochastic"
        noise = next_noise(bundle.memory, bundle.u.device) if stochastic else None
        message = messages.encode(sparse, scan.finite, config.encoding, bundle.size, noise)
        if sparse is not None and config.values != "fp32":
            bundle.tally.note_rounding(sparse.values, message.delivered.values)
    return message


def exchange(step: Step, message: Message) -> Outcome:
    """Agree with all ranks on the mean, and learn what left this rank."""
    options = {} if step.choice.reason else step.config.exchange_options
    target = (step.mean,) if step.scheme.fills else ()
    return step.scheme.run(
        message, step.bundle.u, step.group, step.bundle.memory, *target, **options
    )


def decode(step: Step, sparse: Sparse | None, outcome: Outcome) -> None:
    """Put the mean where it is wanted, and remember what left this rank."""
    bundle, method, sent = step.bundle, step.method, outcome.delivered
    with stage("decode"):
        ok, rounding = outcome.ok, None
        if outcome.update is not None:
            update, ok, rounding = to_gradient(outcome.update, ok, bundle.dtype, step.scale)
            step.into.put(update)
        masked = None
        if sparse is not None and bundle.masks:
            assert outcome.update is not None, "an exchange writes to its own target then"
            masked = to_mask(outcome.update, sent.sparse if isinstance(sent, Entries) else sparse)
        forget = sparse is not None and not method.keeps_rest
        bundle.deliver(sent, ok, rounding, masked, forget, outcome.owned_rounding)
        _note(step, sparse, outcome)


def _note(step: Step, sparse: Sparse | None, outcome: Outcome) -> None:
    """Count for the statistics, and tell the method what all ranks agreed on."""
    tally, sent = step.bundle.tally, outcome.delivered
    if isinstance(sent, Entries):
        tally.note_sent(sent.sparse.count)
        if sparse is not None:
            step.method.learn(step.bundle.memory, sent.sparse, step.choice.k)
        if step.scheme.chooses and step.config.values != "fp32":
            tally.note_rounding(step.bundle.buffer[sent.sparse.indices], sent.sparse.values)
    if outcome.leaked is not None:
        tally.leaked += outcome.leaked


def to_gradient(
    mean: Tensor, ok: Tensor, dtype: torch.dtype, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the mean as the optimiser gets it, whether it is usable, and its rounding.

    The mean is in the gradient's dtype and loss scale. The rounding is None for fp32. Every rank
    keeps the same rounding, so the mean of the residuals grows by exactly that. What fp16 has no
    room for waits there too, unless a loss scale is there that has to fall.
    """
    scaled = mean if scale is None else mean * scale
    if dtype == torch.float32:
        return scaled, ok, None
    if dtype == torch.float16 and scale is None:
        ok = ok & torch.isfinite(mean).all()
        scaled = mean.clamp(-_FP16, _FP16)
    rounded = scaled.to(dtype)
    ok = ok & torch.isfinite(rounded).all()
    seen = rounded.float() if scale is None else rounded.float() / scale
    rounded = torch.where(ok, rounded, float("nan"))
    return rounded, ok, mean - seen
