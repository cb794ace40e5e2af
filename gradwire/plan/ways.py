"""Ways of exchanging that can work, and the preference among them."""

from collections.abc import Iterator, Sequence

from gradwire.compress import METHODS
from gradwire.config import Config
from gradwire.errors import ConfigError, unknown
from gradwire.exchange import EXCHANGES
from gradwire.plan.network import Network
from gradwire.plan.predict import Way

ENCODINGS = (
    ("fp32", "int32"),
    ("fp32", "packed"),
    ("bf16", "int32"),
    ("bf16", "packed"),
    ("int8", "packed"),
)
"""The values and indices that are compared."""
DENSITIES = (0.1, 0.01, 0.001)
"""The densities that are compared."""
_POWERSGD = ("powersgd-1", "powersgd-4")
"""PyTorch's hook, predicted for comparison."""
BEST = ("topk", "gaussiank", "dgc", "trimmed", "mstopk")
"""The methods that choose the k largest. The others are predicted, never recommended."""


def all_ways(
    network: Network,
    densities: Sequence[float],
    methods: Sequence[str] = (),
    encodings: Sequence[tuple[str, str]] = ENCODINGS,
) -> list[Way]:
    """Return the dense ways, PowerSGD, and every combination that Config accepts.

    A combination is method x exchange x encoding x density.
    """
    for name in methods:
        method, _, exchange = name.partition("/")
        if method not in METHODS and name not in _POWERSGD:
            raise unknown("method", method, [*METHODS, *_POWERSGD])
        if exchange and exchange not in EXCHANGES:
            raise unknown("exchange", exchange, EXCHANGES)
    names = methods or [*_POWERSGD, *(m for m in METHODS if m != "dense")]
    sparse = [w for n in names for w in _ways_of(n, network, densities, encodings)]
    dense = [Way("dense", name) for name, exchange in EXCHANGES.items() if exchange.whole]
    return [*dense, *dict.fromkeys(sparse)]


def _ways_of(
    name: str,
    network: Network,
    densities: Sequence[float],
    encodings: Sequence[tuple[str, str]],
) -> Iterator[Way]:
    method, _, named_exchange = name.partition("/")
    if name in _POWERSGD:
        yield Way(name, "")
        return
    for exchange in (
        [named_exchange] if named_exchange else [x for x in EXCHANGES if not EXCHANGES[x].whole]
    ):
        if EXCHANGES[exchange].has_nodes and (network.local == 1 or network.nodes == 1):
            continue
        for values, indices in encodings:
            for density in densities:
                way = Way(method, exchange, values, _useful_indices(method, indices), density)
                if method != "dense" and _is_accepted(way):
                    yield way


def _useful_indices(method: str, indices: str) -> str:
    """Return int32 if no index travels, because there is nothing to pack."""
    return "int32" if METHODS[method].bind({}).is_common else indices


def _is_accepted(way: Way) -> bool:
    suits = EXCHANGES[way.exchange].suits
    if suits is not None and not suits(way.density, way.indices):
        return False
    try:
        Config(
            method=way.method,
            exchange=way.exchange,
            values=way.values,
            indices=way.indices,
            density=way.density,
        )
    except ConfigError:
        return False
    return True


def preference(way: Way) -> int:
    """Return how early the way's exchange is recommended; 0 for never.

    Exchanges come first that take most out of the residuals in a step (docs/exchanges.md). Sketches
    find little in Gaussian gradients.
    """
    return EXCHANGES[way.exchange].preference if way.exchange else 0
