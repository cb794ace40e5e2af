"""A cluster on one Linux machine: a network namespace per rank, with shaped links to one switch.

The switch has a namespace too, so the machine's network is never touched. Removing the namespaces
removes links, addresses and shaping. The names carry the process id of the lab, so that the next
lab can find and remove the namespaces of a killed one.
"""

import os
import re
import signal
import socket
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError, LabError
from gradwire.plan.rate import parse_rate, parse_time, show_rate, show_time
from gradwire.workbench.lab.delay import DelaySwitch
from gradwire.workbench.lab.islands import add_inner_link, cut_ranks, route_inside
from gradwire.workbench.lab.tcp import round_trip, transfer_rate

PREFIX = "gradwire"
LINK = "gw0"
PORT = 29500  # free on every rank, because each rank has a network
NAMESPACES = Path("/run/netns")
MOST_RANKS = 250
RANK_BYTES = 200 * 2**20  # a process that has imported torch
BURST_SECONDS, LEAST_BURST = 0.001, 4096
"""Size of the token bucket: the seconds of sending that it holds, and its least bytes."""
QUEUE = "50ms"
MOST_LATENCY = 1.0
REACHED, TRIES = 0.8, 3
"""Share of the rate that counts as reached, and tries, because the machine may be busy."""


class Lab:
    """`ranks` namespaces, each with a link to one switch; only one lab per process.

    link: the rate of a link in each direction, such as "100mbit". latency: the time that the lab
    adds to a message from rank to rank, "5ms" or seconds. islands: the number of islands of equal
    size, 0 for none; messages inside an island take no slow link.

    with Lab(4, "100mbit") as lab:
        rates = lab.measure()
        with lab.inside(0):
            ...  # sockets and processes made here live on rank 0's link
    """

    interface, port = LINK, PORT

    def __init__(self, ranks: int, link: str, latency: str | float = 0.0, islands: int = 0) -> None:
        self.ranks, self.link, self.rate = ranks, link, parse_rate(link)
        self.islands = cut_ranks(ranks, islands)
        self.latency = parse_time(latency)
        _check_latency(self.latency)
        self._delay: DelaySwitch | None = None
        self.measured = 0.0
        """Median bits per second of the links, once `describe` has measured them; 0 before."""
        _check_ranks(ranks)
        _check_machine()
        self._switch = f"{PREFIX}-{os.getpid()}-switch"
        self._names = [f"{PREFIX}-{os.getpid()}-rank{rank}" for rank in range(ranks)]

    def __enter__(self) -> "Lab":
        remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces, and kill the processes in them."""
        if self._delay is not None:
            self._delay.close()
        for name in (*self._names, self._switch):
            _remove(name)

    def address(self, rank: int) -> str:
        """Return the IP address of a rank."""
        return f"10.77.0.{rank + 1}"

    @contextmanager
    def inside(self, rank: int) -> Iterator[None]:
        """Put this thread into the rank's namespace, with the rank's network, for this context."""
        with _inside(self._names[rank]):
            yield

    def set_link(self, rank: int, up: bool) -> None:
        """Set the rank's link up or down; addresses and shaping stay."""
        from pyroute2 import IPRoute

        with _inside(self._switch), IPRoute() as switch:
            index = switch.link_lookup(ifname=f"port{rank}")[0]
            switch.link("set", index=index, state="up" if up else "down")

    def measure(self) -> list[float]:
        """Measure the bits per second from each rank to the next, one after the other.

        With islands the next one is in the next island.
        """
        far = len(self.islands[0]) if self.islands else 1
        return [self._measure(rank, (rank + far) % self.ranks) for rank in range(self.ranks)]

    def _measure(self, sender: int, receiver: int) -> float:
        """Return the best rate of a few tries, or raise if the link's rate is not reached."""
        best = 0.0
        for _ in range(TRIES):
            with self._sockets(sender, receiver) as (server, client):
                best = max(best, transfer_rate(server, client, self.latency))
            if best >= REACHED * self.rate:
                return best
        raise LabError(
            f"link {self.link!r} is not reached: {show_rate(best)} measured from rank {sender} to "
            f"{receiver}. Ask for a slower link, or quiet the machine."
        )

    def describe(self) -> str:
        """Measure the links, and return a line that compares them with the request."""
        rates = self.measure()
        self.measured = statistics.median(rates)
        asked = show_rate(self.rate)
        measured = f"{show_rate(min(rates))} to {show_rate(max(rates))}"
        if self.latency:
            with self._sockets(0, self.ranks - 1) as (server, client):
                measured += f" and {show_time(round_trip(server, client) / 2)}"
            asked += f" and {show_time(self.latency)}"
        if self.islands:
            with self._sockets(0, 1) as (server, client):
                measured += f", inside islands {show_rate(transfer_rate(server, client))}"
        who = str(self.ranks)
        if self.islands:
            who = f"{len(self.islands)} islands of {len(self.islands[0])}"
        return f"lab: {who} ranks, asked {asked}, measured {measured}"

    @contextmanager
    def _sockets(self, sender: int, receiver: int) -> Iterator[tuple[socket.socket, socket.socket]]:
        """Yield a listening socket at the receiver, and an unconnected one at the sender."""
        with self.inside(receiver):
            server = socket.create_server((self.address(receiver), 0))
        with self.inside(sender):
            client = socket.socket()
        with server, client:
            yield server, client

    def _build(self) -> None:
        """Make the namespaces, the links and the switch."""
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            for name in (self._switch, *self._names):
                _create(name)
            with _inside(self._switch), IPRoute() as switch:
                # With latency a DelaySwitch takes the place of the bridge.
                bridge = None if self.latency else _bridge(switch, "br0")
                for rank in range(self.ranks):
                    self._add_link(switch, bridge, rank)
                for number, island in enumerate(self.islands):
                    self._join_island(switch, _bridge(switch, f"island{number}"), island)
                if self.latency:
                    self._delay = DelaySwitch([f"port{r}" for r in range(self.ranks)], self.latency)
                    self._delay.start()
        except (OSError, NetlinkError) as error:
            raise LabError(
                f"this kernel or container refuses namespaces, veth or a bridge ({error}). "
                "Use a machine, or a container with CAP_SYS_ADMIN and CAP_NET_ADMIN."
            ) from error

    def _add_link(self, switch: Any, bridge: int | None, rank: int) -> None:
        """Add a link from a rank to the switch, shaped at both ends, so in both directions."""
        from pyroute2 import IPRoute

        name, port = self._names[rank], f"port{rank}"
        switch.link("add", ifname=port, kind="veth", peer={"ifname": LINK, "net_ns_fd": name})
        index = switch.link_lookup(ifname=port)[0]
        self._shape(switch, index)
        if bridge is not None:
            switch.link("set", index=index, master=bridge)
        switch.link("set", index=index, state="up")
        with _inside(name), IPRoute() as routes:
            index = routes.link_lookup(ifname=LINK)[0]
            self._shape(routes, index)
            routes.addr("add", index=index, address=self.address(rank), prefixlen=24)
            routes.link("set", index=index, state="up")
            routes.link("set", index=routes.link_lookup(ifname="lo")[0], state="up")

    def _join_island(self, switch: Any, bridge: int, island: range) -> None:
        """Give the ranks of an island a fast network, over which they reach each other."""
        from pyroute2 import IPRoute

        for rank in island:
            add_inner_link(switch, bridge, rank, self._names[rank])
            others = [self.address(other) for other in island if other != rank]
            with _inside(self._names[rank]), IPRoute() as routes:
                route_inside(routes, self.address(rank), others)

    def _shape(self, netlink: Any, index: int) -> None:
        """Limit the rate of an interface with a token bucket (tbf)."""
        from pyroute2.netlink.exceptions import NetlinkError

        rate = self.rate // 8
        burst = max(LEAST_BURST, int(rate * BURST_SECONDS))
        try:
            netlink.tc("add", "tbf", index, rate=rate, burst=burst, latency=QUEUE)
        except NetlinkError as error:
            raise LabError(
                f"this kernel cannot shape links ({error}): it needs sch_tbf (modprobe sch_tbf)"
            ) from error


def _bridge(switch: Any, name: str) -> int:
    """Add a bridge, and return its index."""
    switch.link("add", ifname=name, kind="bridge")
    index: int = switch.link_lookup(ifname=name)[0]
    switch.link("set", index=index, state="up")
    return index


def remove_stale() -> list[str]:
    """Remove the namespaces of labs whose process has ended, and return their names."""
    removed = []
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        match = re.fullmatch(rf"{PREFIX}-(\d+)-(?:switch|rank\d+)", path.name)
        if match and (int(match[1]) == os.getpid() or not Path("/proc", match[1]).exists()):
            _remove(path.name)
            removed.append(path.name)
    return removed


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """Put this thread into the namespace `name`, for this context."""
    from pyroute2 import netns

    netns.pushns(name)
    try:
        yield
    finally:
        netns.popns()


def _create(name: str) -> None:
    """Make a namespace.

    Not by netns.create, which forks: a signal would then run its handler in both processes.
    """
    from pyroute2 import netns

    netns.pushns()
    try:
        netns.setns(name, os.O_CREAT | os.O_EXCL, fork=False)
    finally:
        netns.popns()


def _remove(name: str) -> None:
    """Kill the processes in the namespace and remove it; do nothing if it is absent."""
    from pyroute2 import netns

    path = NAMESPACES / name
    with suppress(FileNotFoundError):
        for pid in _pids_inside(path.stat()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        netns.remove(name)


def _pids_inside(namespace: os.stat_result) -> Iterator[int]:
    """Yield the ids of all processes in a namespace except this process."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with suppress(OSError):
                if os.path.samestat((process / "ns/net").stat(), namespace):
                    yield int(process.name)


def _check_ranks(ranks: int) -> None:
    if not 2 <= ranks <= MOST_RANKS:
        raise ConfigError(f"ranks must be from 2 to {MOST_RANKS}, got {ranks}")


def _check_latency(seconds: float) -> None:
    if seconds > MOST_LATENCY:
        raise ConfigError(f"latency must be at most {MOST_LATENCY:g} s, got {seconds:g} s")


def _check_machine() -> None:
    """Raise if this machine or this user cannot make a lab."""
    if not sys.platform.startswith("linux"):
        raise LabError(f"the lab needs Linux (network namespaces), this is {sys.platform}")
    if os.geteuid():
        raise LabError("the lab needs root, to make network namespaces: sudo env PATH=$PATH ...")
    try:
        import pyroute2  # noqa: F401
    except ModuleNotFoundError:
        raise LabError("the lab needs pyroute2: pip install 'gradwire[lab]'") from None


def check_memory(ranks: int, model: int = 0, name: str = "ranks") -> None:
    """Raise if the ranks need more memory than is free, where the system tells.

    model: bytes that each rank needs beside those of torch. name: the option in the error.
    """
    needed, file = RANK_BYTES + model, Path("/proc/meminfo")
    if not file.exists():
        return
    text = file.read_text()
    free = 1024 * int(text.partition("MemAvailable:")[2].split()[0])
    if ranks * needed > free:
        torch_alone = "" if model else " for torch alone"
        raise LabError(
            f"{name}={ranks} need {ranks * needed / 2**30:.1f} GiB{torch_alone}, "
            f"{free / 2**30:.1f} GiB are free. Use at most {free // needed}."
        )
