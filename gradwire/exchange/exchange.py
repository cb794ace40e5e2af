"""What an exchange is: its function, what it costs, and what it returns."""

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


@dataclass(frozen=True)
class Outcome:
    """The mean over all ranks, and what this rank gave to it.

    update: fp32, `size` + 1 entries, the last one spare; NaN everywhere when not ok. None: the
    exchange has written the mean into its target. delivered: what left this rank, as receivers see
    it. ok: 0-d bool, False when some rank was not finite; then nothing was delivered. leaked: fp64
    [2], the energy that is lost and that of what was chosen, of an exchange that is exempt from the
    law.
    """

    update: Tensor | None
    delivered: Delivered
    ok: Tensor
    leaked: Tensor | None = None


@dataclass(frozen=True)
class Exchange(Registered):
    """A way of agreeing. Only the first three fields are needed; the planner has defaults."""

    run: Callable[..., Outcome]
    bytes: Callable[..., int]
    """(ranks, size, capacity, encoding, options...) -> the most bytes that leave one rank."""
    rounds: Callable[..., int]
    """(ranks, options...) -> how often a rank waits for another, with ring collectives."""
    values: tuple[str, ...] = tuple(VALUES)
    """How values may travel."""
    chooses: bool = False
    """True: it looks at u itself, for the largest of the sum; the message only says how many."""
    check: Callable[..., object] | None = None
    """(options...): raises for a value that cannot work, whatever the model and the ranks."""
    prepare: Callable[..., None] | None = None
    """(group, size, capacity, options...): raises for what cannot work; called by all ranks."""
    fills: bool = False
    """True: it takes the target of the mean as its last argument."""
    whole: str = ""
    """How values travel in an exchange that always sends all of u; empty for every other one."""
    stochastic: bool = False
    """True: values may be rounded stochastically."""
    adds_u: bool = False
    """True: it adds u itself where any rank chose, whatever values the message has."""
    legs: "Callable[[Network, int, int, Encoding], list[Leg]] | None" = None
    """(network, size, capacity, encoding) -> its bytes and rounds by link. None: one ring."""
    received: "Callable[[Received], float] | None" = None
    """The nanoseconds to read and add up what arrives. None: every rank's entries, one by one."""
    work: "Callable[[Work, LocalTask], Work] | None" = None
    """The seconds of a worker's own work, from the usual ones. None: the usual ones."""
    suits: Callable[[float, str], bool] | None = None
    """(density, indices) -> False where the planner need not try it. None: it always does."""
    preference: int = 0
    """The planner recommends one with a higher number first, and none with 0."""

    @property
    def has_nodes(self) -> bool:
        """True: it treats the ranks of one node apart, by an option `local`."""
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
        """The legs of one bundle of `size` entries, messages with room for `capacity` of them."""
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
    """What arrives at a rank: `k` entries of each of `ranks`; nanoseconds to treat one of them."""

    ranks: int
    nodes: int
    k: int
    read: float
    add: float
    merge: float


@dataclass(frozen=True)
class LocalTask:
    """One bundle for `Exchange.work`, and the seconds that parts of it take on the device.

    floor: a pass over gradient and residual. copies: the mean to where it is wanted. select:
    (density, entries) -> choosing so many of these. cell: an entry into a cell of a sketch, or out
    of one. merging: a round of a merge.
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
