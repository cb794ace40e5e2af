"""The path of one bundle. Read this first.

gradient -> accumulate -> compress -> encode -> exchange -> decode -> averaged gradient
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.accumulate.bundle import Bundle
from gradwire.accumulate.momentum import to_mask
from gradwire.compress import METHODS
from gradwire.config import Config
from gradwire.encode import encode
from gradwire.encode.noise import next_noise
from gradwire.exchange import EXCHANGES
from gradwire.kernels.scan import Piece
from gradwire.kernels.target import Target
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.state.choice import Choice
from gradwire.types import Delivered, Scan, Slot, Sparse, padding


def average(
    bundle: Bundle,
    pieces: Sequence[Piece],
    choice: Choice,
    config: Config,
    group: Group,
    skipped: Tensor,
    scale: Tensor | None = None,
    unused: Sequence[Slot] = (),
    in_place: bool = False,
) -> Tensor | None:
    """The mean over all ranks of gradient + residual, as far as it was sent; the rest is kept.

    With momentum correction it is momentum + residual.
    Returns a flat vector in the gradient's dtype and loss scale, NaN when a rank was not finite.
    in_place: it may go into `pieces` instead, where that takes no copy; then None is returned.
    """
    exchange, method = EXCHANGES[choice.exchange], METHODS[config.method]
    with stage("accumulate"):
        if not choice.reason and not exchange.chooses:
            method.begin(bundle.u, choice.k, bundle.memory, config.method_options)
        unscale = None if scale is None else scale.reciprocal()
        scan = bundle.accumulate(pieces, choice.group, skipped, unscale, unused, choice.rough)
        into = []
        if exchange.fills:
            as_it_is = bundle.dtype == torch.float32 and scale is None and not bundle.masks
            into = [Target(bundle.size, bundle.u.device, pieces if in_place and as_it_is else ())]
            into[0].clear()
    sparse = None
    if not choice.reason:
        with stage("compress"):
            sparse = _compress(bundle, choice, config, scan)
    with stage("encode"):
        stochastic = sparse is not None and config.rounding == "stochastic"
        noise = next_noise(bundle.memory, bundle.u.device) if stochastic else None
        message = encode(sparse, scan.finite, config.encoding, bundle.size, noise)
        if sparse is not None and config.values != "fp32":
            bundle.note_rounding(sparse.values, message.delivered.values)
    options = {} if choice.reason else config.exchange_options
    outcome = exchange.run(message, bundle.u, group, bundle.memory, *into, **options)
    with stage("decode"):
        update, ok, loss = finish(outcome.update, outcome.ok, bundle.dtype, scale)
        sent = outcome.delivered
        indices, values = (sent.indices, sent.values) if isinstance(sent, Sparse) else (None, sent)
        if isinstance(sent, Sparse):
            bundle.note_sent(sent.count)
        forget = sparse is not None and not method.feedback(config.method_options)
        masked = None
        if sparse is not None and bundle.masks:
            assert outcome.update is not None
            masked = to_mask(outcome.update, sent if isinstance(sent, Sparse) else sparse)
        bundle.delivered = Delivered(ok, indices, values, loss, masked, forget)
        if method.learns is not None and sparse is not None and isinstance(sent, Sparse):
            method.learns(bundle.memory, sent, choice.k)
        if isinstance(sent, Sparse) and exchange.chooses and config.values != "fp32":
            bundle.note_rounding(bundle.buffer[sent.indices], sent.values)
        if outcome.leaked is not None:
            bundle.leaked += outcome.leaked
    return update


def _compress(bundle: Bundle, choice: Choice, config: Config, scan: Scan) -> Sparse:
    if EXCHANGES[choice.exchange].chooses:
        # The exchange looks at u itself: of the message it needs the room for k entries only.
        return padding(choice.k, bundle.u)
    run = METHODS[config.method].run
    return run(bundle.u, choice.k, bundle.memory, scan, **config.method_options)


def finish(
    update: Tensor | None, ok: Tensor, dtype: torch.dtype, scale: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """The update as the optimiser gets it, whether it can be used, and what rounding it lost.

    Every rank keeps the same loss, so the mean of the residuals grows by just that.
    """
    if update is None:
        return None, ok, None
    scaled = update if scale is None else update * scale
    if dtype == torch.float32:
        return scaled, ok, None
    rounded = scaled.to(dtype)
    ok = ok & torch.isfinite(rounded).all()
    seen = rounded.float() if scale is None else rounded.float() / scale
    rounded = torch.where(ok, rounded, float("nan"))
    return rounded, ok, update - seen
