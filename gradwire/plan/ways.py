"""Ways of exchanging that can work: PyTorch's, gradwire's, and recipes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradwire.compress import METHODS
from gradwire.config import Config
from gradwire.errors import ConfigError, unknown
from gradwire.exchange import EXCHANGES
from gradwire.plan.network import Network
from gradwire.plan.outside import OUTSIDE
from gradwire.plan.predict import Way
from gradwire.plan.workload import Workload
from gradwire.recipes import LOCAL_RECIPES, RECIPES

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
_SETTINGS = ("method", "exchange", "values", "indices", "density")
"""The fields of a recipe that decide the time of a step; a warm-up is over after some epochs."""
BEST = ("topk",)
"""The method that chooses the k largest. The others are predicted, never recommended."""


def all_ways(
    network: Network,
    densities: Sequence[float],
    methods: Sequence[str] = (),
    encodings: Sequence[tuple[str, str]] = ENCODINGS,
) -> list[Way]:
    """Return gradwire's dense ways, and every combination that Config accepts.

    A combination is method x exchange x encoding x density. A name in `methods` may also be one of
    PyTorch's ways.
    """
    for name in methods:
        method, _, exchange = name.partition("/")
        if method not in METHODS and name not in OUTSIDE:
            raise unknown("method", method, [*METHODS, *OUTSIDE])
        if exchange and exchange not in EXCHANGES:
            raise unknown("exchange", exchange, EXCHANGES)
    names = methods or [m for m in METHODS if m != "dense"]
    sparse = [w for n in names for w in _ways_of(n, network, densities, encodings)]
    dense = [Way("dense", name) for name, exchange in EXCHANGES.items() if exchange.whole]
    return [*dense, *dict.fromkeys(sparse)]


def torch_ways(load: Workload, network: Network, methods: Sequence[str] = ()) -> list[Way]:
    """Return PyTorch's ways: those that send everything, and PowerSGD unless others are named."""
    ways = []
    for name, outside in OUTSIDE.items():
        has_nodes = network.local > 1 and network.nodes > 1
        asked = not outside.rank or not methods or name in methods
        # A number of parameters tells no shapes, and PowerSGD's bytes depend on the shapes.
        known = load.knows_shapes or not outside.rank
        if asked and known and (has_nodes or not outside.needs_nodes):
            ways.append(Way(name, ""))
    return ways


def recipe_ways(names: Sequence[str], network: Network | None = None) -> list[Way]:
    """Return the ways of recipes by name; local steps also through `owner`, and with islands.

    With owners the bytes do not grow with the workers. The loss is nearly the same: only means
    are rounded once more. Islands are nodes of several ranks.
    """
    has_islands = network is not None and network.local > 1 and network.nodes > 1
    ways = []
    for name in names:
        if name not in (*RECIPES, *LOCAL_RECIPES):
            raise unknown("recipe", name, [*RECIPES, *LOCAL_RECIPES])
        is_local = name in LOCAL_RECIPES
        fields = (LOCAL_RECIPES if is_local else RECIPES)[name].fields
        config = Config(**{k: v for k, v in fields.items() if k in _SETTINGS})
        way = Way(
            config.method, config.exchange, config.values, config.indices, config.density,
            name, fields.get("every", 1),
        )  # fmt: skip
        forms = [way, replace(way, exchange="owner")] if is_local else [way]
        ways += forms
        if is_local and has_islands:
            ways += [replace(form, islands=True) for form in forms]
    return list(dict.fromkeys(ways))


def _ways_of(
    name: str,
    network: Network,
    densities: Sequence[float],
    encodings: Sequence[tuple[str, str]],
) -> Iterator[Way]:
    method, _, named_exchange = name.partition("/")
    if name in OUTSIDE:
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
