"""Which method goes with which exchange and encoding, and an exchange run by hand."""

import itertools
from dataclasses import dataclass

import torch

from gradwire.accumulate.owned import OWNED, in_order
from gradwire.compress import METHODS
from gradwire.encode import Encoding, encode
from gradwire.encode.format import VALUES
from gradwire.exchange import EXCHANGES
from gradwire.ranks.virtual import VirtualRanks
from gradwire.types import Entries, Everything, Memory, Rounded, align, empty_sparse
from tests.law.cases import NOTHING

SKETCHES = ("sketched", "gs-sgd")


def allowed(methods=METHODS):
    """(method, exchange, values) that Config takes."""
    return [
        (method, name, values)
        for method, name, values in itertools.product(methods, EXCHANGES, VALUES)
        if values in EXCHANGES[name].values
        and (method in ("topk", "dense") or not EXCHANGES[name].chooses)
        and METHODS[method].exchange in ("", name)
    ]


def kept_by_owners(memories, size):
    """What all owners keep of the mean of `size` entries; 0 (0-d) where nobody owns a part."""
    if OWNED not in memories[0]:
        return NOTHING
    return in_order(torch.stack([memory[OWNED] for memory in memories]), size).double()


def owned_after(states, size):
    """What owners keep of bundle 0, as the next step of these states will find it."""
    bundles = [(state.bundles[0], state.was_skipped()) for state in states]
    if not bundles[0][0].keeps_owned:
        return NOTHING
    return in_order(torch.stack([b.owned_rounding(s) for b, s in bundles]), size).double()


def options(exchange, size, k):
    """A sketch as small as it may be; nothing for the others."""
    return {"rows": 1, "columns": min(align(size), 4 * k)} if exchange in SKETCHES else {}


@dataclass
class Result:
    """What all ranks got; `residual` is u less what was delivered; `kept` is by owners."""

    updates: list
    residuals: list
    ok: list
    sent: int
    rounds: int
    kept: torch.Tensor


class Hand:
    """P ranks that run one exchange without choosing dense instead, step by step."""

    def __init__(self, exchange, world, method="topk", values="fp32", indices="int32", **options):
        """method: "randk:shared" is randk with shared=True."""
        name, _, flag = method.partition(":")
        self.exchange, self.options = EXCHANGES[exchange], options
        self.method = METHODS[name].bind({flag: True} if flag else {})
        self.encoding = Encoding(values, "common" if self.method.is_common else indices)
        self.ranks = VirtualRanks(world)
        self.memories = [Memory(rank) for rank in range(world)]

    def step(self, us, k, finite=None):
        def work(rank):
            u, memory = us[rank], self.memories[rank]
            sparse = empty_sparse(k, u)
            if not self.exchange.chooses:
                sparse = self.method.choose(u, k, memory)
            fine = torch.tensor(True if finite is None else finite[rank])
            message = encode(sparse, fine, self.encoding)
            group = self.ranks.groups[rank]
            out = self.exchange.run(message, u, group, memory, **self.options)
            if out.owned_rounding is not None and out.ok:
                memory[OWNED] = out.owned_rounding
            return out.update, u - flat(out.delivered, u), bool(out.ok)

        group = self.ranks.groups[0]
        before = group.bytes_sent, group.rounds
        updates, residuals, ok = zip(*self.ranks.run(work), strict=True)
        sent, rounds = group.bytes_sent - before[0], group.rounds - before[1]
        kept = kept_by_owners(self.memories, us[0].numel())
        return Result([x[:-1] for x in updates], list(residuals), list(ok), sent, rounds, kept)


def flat(delivered, u):
    match delivered:
        case Everything():
            return u
        case Rounded(values):
            return values
        case Entries(sparse):
            return sparse.dense()
