"""The choice for one bundle in one step: how many entries, by which exchange, and the reason."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.accumulate.bundle import Bundle
from gradwire.accumulate.schedule import entry_count
from gradwire.config import Config
from gradwire.exchange import EXCHANGES
from gradwire.ranks.group import Group

REASONS = {
    "method": "the method is dense",
    "rule": "a rule keeps these parameters dense",
    "small": "fewer entries than dense_below",
    "schedule": "the schedule says density 1",
    "flush": "flush or detach was called",
    "bytes": "the exchange would send more bytes than dense",
}


@dataclass(frozen=True)
class Choice:
    """k entries by `exchange`; with a `reason`, all of u by an exchange that sends all.

    block: entries per maximum that the scan leaves, 0 for none. maxima16: True if 16 bits of a
    maximum are enough.
    """

    k: int
    exchange: str
    reason: str = ""
    block: int = 0
    maxima16: bool = False
    selects: bool = True
    """True: the method chooses the entries. Otherwise the exchange does, or all are sent."""


def choose(bundle: Bundle, config: Config, step: int, ranks: int, flush: bool) -> Choice:
    """Return the choice for this step, the same on every rank."""
    density = config.schedule.density_at(step)
    k = bundle.size if config.encodes_all else entry_count(density, bundle.entries)
    reason = _why_dense(bundle, config, density, k, ranks, flush)
    exchange = EXCHANGES[config.exchange]
    if reason:
        # A flush must deliver u unchanged, so that nothing is kept.
        as_asked = exchange.whole and reason != "flush"
        sends = config.exchange if as_asked else "dense"
        return Choice(bundle.size, sends, reason, selects=False)
    if exchange.chooses:
        return Choice(k, config.exchange, selects=False)
    method = config.bound_method
    block = method.block(k, bundle.size, bundle.buffer.device)
    return Choice(k, config.exchange, block=block, maxima16=method.method.maxima16)


def prepare(bundles: Sequence[Bundle], config: Config, group: Group) -> None:
    """Let the exchange refuse what it cannot do before the first step, on every rank."""
    check = EXCHANGES[config.exchange].prepare
    if check is None:
        return
    for bundle, step in itertools.product(bundles, config.schedule.change_steps()):
        choice = choose(bundle, config, step, group.size, flush=False)
        if not choice.reason:
            check(group, bundle.size, choice.k, **config.exchange_options)


def _why_dense(
    bundle: Bundle, config: Config, density: float, k: int, ranks: int, flush: bool
) -> str:
    if config.method == "dense" and not config.encodes_all:
        return "method"
    if bundle.dense:
        return "rule"
    if flush:
        return "flush"
    if density == 1 and not config.encodes_all:
        return "schedule"
    if bundle.entries < config.dense_below:
        return "small"
    cost, dense = EXCHANGES[config.exchange].bytes, EXCHANGES["dense"].bytes
    size, encoding = bundle.size, config.encoding
    room = config.bound_method.capacity(k, size, ranks)
    bytes_sent = cost(ranks, size, room, encoding, **config.exchange_options)
    return "bytes" if bytes_sent > dense(ranks, size, k, encoding) else ""
