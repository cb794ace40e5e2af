"""A cluster on one Linux machine: a network namespace a rank, shaped links to one switch.

Everything is inside namespaces of our own, the switch too: removing them removes the links, the
addresses and the shaping, and the machine's own network is never touched. Their names carry the
process id of the lab, so that the next lab finds what a killed one left.
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
from gradwire.workbench.lab.delay import Delay
from gradwire.workbench.lab.tcp import round_trip, transfer_rate

PREFIX = "gradwire"
LINK = "gw0"
PORT = 29500  # free on every rank: each has a network of its own
NAMESPACES = Path("/run/netns")
MOST_RANKS = 250
RANK_BYTES = 200 * 2**20  # a process that has imported torch, and little more
BURST_SECONDS, LEAST_BURST = 0.001, 4096
QUEUE = "50ms"
MOST_LATENCY = 1.0
REACHED, TRIES = 0.8, 3  # a busy moment of the machine is no slow link


class Lab:
    """`ranks` namespaces whose links to one switch carry `link` each way; one a process.

    `latency`: what a message takes from rank to rank beside, `5ms` or seconds.

    with Lab(4, "100mbit") as lab:
        rates = lab.measure()
        with lab.inside(0):
            ...  # sockets and processes made here live on rank 0's link
    """

    interface, port = LINK, PORT

    def __init__(self, ranks: int, link: str, latency: str | float = 0.0) -> None:
        self.ranks, self.link, self.rate = ranks, link, parse_rate(link)
        self.latency = parse_time(latency)
        _check_latency(self.latency)
        self._delay: Delay | None = None
        self.measured = 0.0
        """Bits a second of a link, the median, once they were looked at."""
        _check_ranks(ranks)
        _check_machine()
        self._switch = f"{PREFIX}-{os.getpid()}-switch"
        self._names = [f"{PREFIX}-{os.getpid()}-rank{rank}" for rank in range(ranks)]

    def __enter__(self) -> "Lab":
        remove_left()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the namespaces, and stops what still runs in them."""
        if self._delay is not None:
            self._delay.close()
        for name in (*self._names, self._switch):
            _remove(name)

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    @contextmanager
    def inside(self, rank: int) -> Iterator[None]:
        """This thread is on rank's machine, so to speak."""
        with _inside(self._names[rank]):
            yield

    def plug(self, rank: int, up: bool) -> None:
        """Joins rank's cable to the switch again, or pulls it; addresses and shaping stay."""
        from pyroute2 import IPRoute

        with _inside(self._switch), IPRoute() as switch:
            index = switch.link_lookup(ifname=f"port{rank}")[0]
            switch.link("set", index=index, state="up" if up else "down")

    def measure(self) -> list[float]:
        """Bits a second from each rank to the next, one after another."""
        return [self._measure(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]

    def _measure(self, sender: int, receiver: int) -> float:
        best = 0.0
        for _ in range(TRIES):
            with self._sockets(sender, receiver) as both:
                best = max(best, transfer_rate(*both, self.latency))
            if best >= REACHED * self.rate:
                return best
        raise LabError(
            f"link {self.link!r} is not reached: {show_rate(best)} measured from rank {sender} to "
            f"{receiver}. Ask for a slower link, or quiet the machine."
        )

    def describe(self) -> str:
        """What was asked and what is measured, in a line."""
        rates = self.measure()
        self.measured = statistics.median(rates)
        asked, got = show_rate(self.rate), f"{show_rate(min(rates))} to {show_rate(max(rates))}"
        if self.latency:
            with self._sockets(0, 1) as both:
                got += f" and {show_time(round_trip(*both) / 2)}"
            asked += f" and {show_time(self.latency)}"
        return f"lab: {self.ranks} ranks, asked {asked}, measured {got}"

    @contextmanager
    def _sockets(self, sender: int, receiver: int) -> Iterator[tuple[socket.socket, socket.socket]]:
        """A listening socket at the receiver, one that is not connected at the sender."""
        with self.inside(receiver):
            server = socket.create_server((self.address(receiver), 0))
        with self.inside(sender):
            client = socket.socket()
        with server, client:
            yield server, client

    def _build(self) -> None:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            for name in (self._switch, *self._names):
                _create(name)
            with _inside(self._switch), IPRoute() as switch:
                bridge = None if self.latency else _bridge(switch)
                for rank in range(self.ranks):
                    self._plug(switch, bridge, rank)
                if self.latency:
                    self._delay = Delay([f"port{r}" for r in range(self.ranks)], self.latency)
                    self._delay.start()
        except (OSError, NetlinkError) as error:
            raise LabError(
                f"this kernel or container refuses namespaces, veth or a bridge ({error}). "
                "Use a machine, or a container with CAP_SYS_ADMIN and CAP_NET_ADMIN."
            ) from error

    def _plug(self, switch: Any, bridge: int | None, rank: int) -> None:
        """A cable from rank to the switch, shaped at both ends: full duplex."""
        from pyroute2 import IPRoute

        name, port = self._names[rank], f"port{rank}"
        switch.link("add", ifname=port, kind="veth", peer={"ifname": LINK, "net_ns_fd": name})
        index = switch.link_lookup(ifname=port)[0]
        self._shape(switch, index)
        if bridge is not None:
            switch.link("set", index=index, master=bridge)
        switch.link("set", index=index, state="up")
        with _inside(name), IPRoute() as own:
            index = own.link_lookup(ifname=LINK)[0]
            self._shape(own, index)
            own.addr("add", index=index, address=self.address(rank), prefixlen=24)
            own.link("set", index=index, state="up")
            own.link("set", index=own.link_lookup(ifname="lo")[0], state="up")

    def _shape(self, netlink: Any, index: int) -> None:
        from pyroute2.netlink.exceptions import NetlinkError

        rate = self.rate // 8
        burst = max(LEAST_BURST, int(rate * BURST_SECONDS))
        try:
            netlink.tc("add", "tbf", index, rate=rate, burst=burst, latency=QUEUE)
        except NetlinkError as error:
            raise LabError(
                f"this kernel cannot shape links ({error}): it needs sch_tbf (modprobe sch_tbf)"
            ) from error


def _bridge(switch: Any) -> int:
    switch.link("add", ifname="br0", kind="bridge")
    index: int = switch.link_lookup(ifname="br0")[0]
    switch.link("set", index=index, state="up")
    return index


def remove_left() -> list[str]:
    """Removes the namespaces of labs that are no more, and returns their names."""
    left = []
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        match = re.fullmatch(rf"{PREFIX}-(\d+)-(?:switch|rank\d+)", path.name)
        if match and (int(match[1]) == os.getpid() or not Path("/proc", match[1]).exists()):
            _remove(path.name)
            left.append(path.name)
    return left


@contextmanager
def _inside(name: str) -> Iterator[None]:
    from pyroute2 import netns

    netns.pushns(name)
    try:
        yield
    finally:
        netns.popns()


def _create(name: str) -> None:
    """Makes a namespace in this thread: netns.create forks, and a signal would end in both."""
    from pyroute2 import netns

    netns.pushns()
    try:
        netns.setns(name, os.O_CREAT | os.O_EXCL, fork=False)
    finally:
        netns.popns()


def _remove(name: str) -> None:
    """Kills what runs in the namespace and removes it, if it is there."""
    from pyroute2 import netns

    path = NAMESPACES / name
    with suppress(FileNotFoundError):
        for pid in _processes(path.stat()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        netns.remove(name)


def _processes(namespace: os.stat_result) -> Iterator[int]:
    """The processes in a namespace, but for this one."""
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
    if not sys.platform.startswith("linux"):
        raise LabError(f"the lab needs Linux (network namespaces), this is {sys.platform}")
    if os.geteuid():
        raise LabError("the lab needs root, to make network namespaces: sudo env PATH=$PATH ...")
    try:
        import pyroute2  # noqa: F401
    except ModuleNotFoundError:
        raise LabError("the lab needs pyroute2: pip install 'gradwire[lab]'") from None


def check_memory(ranks: int, model: int = 0, name: str = "ranks") -> None:
    """Refuses more ranks than fit, where that is known; each has torch and `model` bytes."""
    each, file = RANK_BYTES + model, Path("/proc/meminfo")
    if not file.exists():
        return
    text = file.read_text()
    free = 1024 * int(text.partition("MemAvailable:")[2].split()[0])
    if ranks * each > free:
        what = "" if model else " for torch alone"
        raise LabError(
            f"{name}={ranks} need {ranks * each / 2**30:.1f} GiB{what}, "
            f"{free / 2**30:.1f} GiB are free. Use at most {free // each}."
        )
