"""What one bundle does in one step: how many entries, by which exchange, and why."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.accumulate.bundle import Bundle
from gradwire.accumulate.schedule import entries
from gradwire.compress import METHODS
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
    """k entries by `exchange`; with a `reason`, everything by the dense exchange.

    group: entries a group whose maxima the scan leaves. rough: whether 16 bits of these are enough.
    """

    k: int
    exchange: str
    reason: str = ""
    group: int = 0
    rough: bool = False


def choose(bundle: Bundle, config: Config, step: int, ranks: int, flush: bool) -> Choice:
    """The choice for this step, the same on every rank."""
    density = config.schedule.at(step)
    asked = density, ranks, flush, config
    if bundle.chosen[1:] != asked:
        bundle.chosen = _choose(bundle, config, density, ranks, flush), *asked
    choice: Choice = bundle.chosen[0]
    return choice


def _choose(bundle: Bundle, config: Config, density: float, ranks: int, flush: bool) -> Choice:
    k = entries(density, bundle.entries)
    reason = _why_dense(bundle, config, density, k, ranks, flush)
    if reason:
        # What a flush sends must arrive as it is, so that nothing is kept.
        as_asked = EXCHANGES[config.exchange].whole and reason != "flush"
        return Choice(bundle.size, config.exchange if as_asked else "dense", reason)
    looks = EXCHANGES[config.exchange].chooses
    method = METHODS[config.method]
    device, options = bundle.buffer.device, config.method_options
    group = 0 if looks else method.group_of(k, bundle.size, device, options)
    return Choice(k, config.exchange, group=group, rough=method.rough)


def prepare(bundles: Sequence[Bundle], config: Config, group: Group) -> None:
    """Let the exchange refuse what it cannot do before the first step, on every rank."""
    check = EXCHANGES[config.exchange].prepare
    if check is None:
        return
    for bundle, step in itertools.product(bundles, config.schedule.changes()):
        choice = choose(bundle, config, step, group.size, flush=False)
        if not choice.reason:
            check(group, bundle.size, choice.k, **config.exchange_options)


def _why_dense(
    bundle: Bundle, config: Config, density: float, k: int, ranks: int, flush: bool
) -> str:
    if config.method == "dense":
        return "method"
    if bundle.dense:
        return "rule"
    if flush:
        return "flush"
    if density == 1:
        return "schedule"
    if bundle.entries < config.dense_below:
        return "small"
    cost, dense = EXCHANGES[config.exchange].bytes, EXCHANGES["dense"].bytes
    size, encoding = bundle.size, config.encoding
    method = METHODS[config.method]
    room = method.share(method.room(k, size, config.method_options), size, ranks)
    bytes_sent = cost(ranks, size, room, encoding, **config.exchange_options)
    return "bytes" if bytes_sent > dense(ranks, size, k, encoding) else ""
