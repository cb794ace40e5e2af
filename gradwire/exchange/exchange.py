"""Exchange: the function that averages, its costs, and its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gradwire.encode.format import VALUES
from gradwire.errors import ConfigError
from gradwire.types import Delivered, Registered

if TYPE_CHECKING:
    from gradwire.config import Config
    from gradwire.encode import Encoding
    from gradwire.plan.network import Leg, Network
    from gradwire.plan.work import Work


SUMMED = ("fp32", "bf16")
"""The values that an exchange can add up on the way."""


@dataclass(frozen=True)
class Outcome:
    """The mean over all ranks, and this rank's contribution to it.

    update: fp32, `size` + 1 entries, the last one spare; NaN everywhere if not ok. None: the
    exchange has written the mean into its target.
    delivered: the part of u that left this rank, as receivers see it.
    ok: 0-d bool, False if some rank was not finite. Then nothing was delivered.
    leaked: fp64 [2], the energy that was lost and the energy that was chosen. Only an exchange that
    is exempt from the law has it.
    owned_rounding: the rounding of this rank's part of the mean, which the rank keeps as its owner.
    Only an exchange with `owns_parts` has it.
    """

    update: Tensor | None
    delivered: Delivered
    ok: Tensor
    leaked: Tensor | None = None
    owned_rounding: Tensor | None = None


@dataclass(frozen=True)
class Exchange(Registered):
    """Way of agreeing on a mean; only the first three fields are needed.

    The planner has defaults for the fields without a value.
    """

    run: Callable[..., Outcome]
    """(message, u, group, memory, *, options...) -> the mean, and this rank's contribution."""
    bytes: Callable[..., int]
    """(ranks, size, capacity, encoding, options...) -> the most bytes that leave one rank."""
    rounds: Callable[..., int]
    """(ranks, options...) -> the times that a rank waits for another, with ring collectives."""
    values: tuple[str, ...] = tuple(VALUES)
    """The dtypes and codes in which values may travel."""
    chooses: bool = False
    """True: the exchange chooses the largest entries of the sum; the message gives only k."""
    check: Callable[..., object] | None = None
    """(options...): raises for a value that can never work, whatever the model and the ranks."""
    prepare: Callable[..., None] | None = None
    """(group, size, capacity, options...): raises for settings that fail; called by all ranks."""
    fills: bool = False
    """True: the last argument of the exchange is the target of the mean."""
    whole: str = ""
    """The dtype of the values in an exchange that always sends all of u; empty for the others."""
    stochastic: bool = False
    """True: values may be rounded stochastically."""
    owns_parts: bool = False
    """True: ranks own parts of the mean, and keep the rounding of their part."""
    adds_u: bool = False
    """True: the exchange adds u itself where any rank chose, whatever values the message has."""
    legs: "Callable[[Network, int, int, Encoding], list[Leg]] | None" = None
    """(network, size, capacity, encoding) -> the bytes and rounds by link. None: one ring."""
    received: "Callable[[Received], float] | None" = None
    """The nanoseconds to read and add up arriving entries. None: one by one, from every rank."""
    work: "Callable[[Work, LocalTask], Work] | None" = None
    """(usual work, task) -> the seconds of a worker's local work. None: the usual work."""
    suits: Callable[[float, str], bool] | None = None
    """(density, indices) -> False if the planner need not try the exchange. None: always True."""
    preference: int = 0
    """The planner recommends exchanges with a higher number first, and never one with 0."""

    @property
    def has_nodes(self) -> bool:
        """True: the exchange treats the ranks of one node apart, by an option `local`."""
        return "local" in self.options

    def check_config(self, config: "Config") -> None:
        """Raise ConfigError for a config that this exchange cannot work with."""
        if self.whole and config.values != "fp32":
            raise ConfigError(
                f"values={config.values!r} has no effect on exchange {self.name!r}; there are "
                f"'dense' (fp32) and 'dense-bf16'"
            )
        if config.values not in self.values:
            raise ConfigError(
                f"exchange {self.name!r} adds values on the way: "
                f"{' or '.join(self.values)}, not {config.values!r}"
            )
        if self.adds_u and config.options.get("unbiased"):
            raise ConfigError(
                f"exchange {self.name!r} adds the values of u itself, not the d/k times these that "
                "unbiased=True sends: use exchange='allgather'"
            )
        if self.check is not None:
            self.check(**config.exchange_options)
        if self.chooses and config.method not in ("topk", "dense"):
            raise ConfigError(
                f"exchange {self.name!r} chooses the entries itself, by the size of their sum: "
                f"method 'topk', not {config.method!r}"
            )

    def legs_on(
        self, network: "Network", size: int, capacity: int, encoding: "Encoding"
    ) -> "list[Leg]":
        """Return the legs of one bundle of `size` entries; a message has room for `capacity`."""
        ranks = network.workers
        if ranks == 1:
            return []
        encoding = encoding.settled(size, capacity)
        if self.legs is not None:
            return self.legs(network, size, capacity, encoding)
        options = {"local": network.local} if self.has_nodes else {}
        sent = self.bytes(ranks, size, capacity, encoding, **options)
        return [network.ring(sent, self.rounds(ranks, **options))]


@dataclass(frozen=True)
class Received:
    """Entries that arrive at a rank: `k` of each of `ranks`.

    read, add, merge: nanoseconds to read, add or merge one entry.
    """

    ranks: int
    nodes: int
    k: int
    read: float
    add: float
    merge: float


@dataclass(frozen=True)
class LocalTask:
    """Bundle for `Exchange.work`, with the seconds that parts of its local work take.

    floor: one pass over gradient and residual.
    copies: copying the mean to its target.
    select: (density, entries) -> seconds to choose that share of the entries.
    cell: putting one entry into a cell of a sketch, or taking it out.
    merging: one round of a merge.
    """

    size: int
    k: int
    ranks: int
    local: int
    bundle: float
    floor: float
    copies: float
    select: Callable[[float, float], float]
    cell: float
    merging: float
