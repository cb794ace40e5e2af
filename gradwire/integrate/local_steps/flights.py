"""Flights: differences of weights on their way through an exchange, perhaps in the background."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.errors import ExchangeError
from gradwire.integrate.ddp.thread import OrderedThread
from gradwire.kernels.side_stream import keep_for_stream
from gradwire.ranks.group import Group

log = logging.getLogger("gradwire")


@dataclass
class Flight:
    """One fragment's exchange, from the difference that is taken to the update that lands.

    number: the fragment. taken_at, due: the inner steps at which the difference was taken and at
    which the update lands. flushes: send everything that is kept.
    values: by parameter the difference, and after the exchange the update, fp32.
    taken: by parameter the weights at `taken_at`; empty if the update lands at once.
    ok: True (0-d) if every rank was finite; set by the exchange.
    """

    number: int
    taken_at: int
    due: int
    flushes: bool
    values: dict[str, Tensor]
    taken: dict[str, Tensor] = field(default_factory=dict)
    ok: Tensor | None = None
    error: Exception | None = None
    event: "torch.cuda.Event | None" = None
    """Recorded on the background's stream, after the exchange."""
    done: threading.Event = field(default_factory=threading.Event)

    def arrived(self) -> "Flight":
        """Note that the exchange has ended, and return the flight."""
        self.done.set()
        return self


class Background:
    """A thread that exchanges flights in the order in which they were taken.

    On CUDA the thread enqueues on a stream of its own, and the host waits for nothing. Gloo's
    collectives block, so they run beside the training steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread: OrderedThread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._device = device
        self.group: Group | None = None
        """The ranks that exchange."""
        self.broken: Exception | None = None
        """The error that ended the exchange."""

    def send(self, flight: Flight, exchange: Callable[[Flight], None]) -> None:
        """Run `exchange` of this flight in the thread."""
        if self._thread is None:
            self._thread = OrderedThread("gradwire local steps")
            if self._device.type == "cuda":
                self._stream = torch.cuda.Stream(self._device, priority=-1)
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._device).record_event()
        self._thread.submit(lambda: self._run(flight, exchange, ready))

    @torch.no_grad()
    def _run(
        self,
        flight: Flight,
        exchange: Callable[[Flight], None],
        ready: "torch.cuda.Event | None",
    ) -> None:
        try:
            if self.broken is not None:
                raise self.broken
            if self._stream is not None and ready is not None:
                torch.cuda.set_stream(self._stream)
                self._stream.wait_event(ready)
                # The training stream may free them while this stream still reads.
                keep_for_stream([flight.values], self._device)
            exchange(flight)
            if self._stream is not None:
                flight.event = self._stream.record_event()
        except Exception as error:
            flight.error = self.broken = self.broken or error
            log.error("%s", error)
        finally:
            flight.done.set()

    def wait(self, flight: Flight) -> None:
        """Wait until the exchange of a flight has ended, and raise its error."""
        flight.done.wait()
        if flight.error is not None:
            raise flight.error
        if flight.event is not None:
            torch.cuda.current_stream(self._device).wait_event(flight.event)
            keep_for_stream([flight.values, flight.ok], self._device)

    def close(self) -> None:
        """Wait for the exchanges that have begun, and end the thread."""
        if self._thread is not None:
            if not self._thread.close() and self.group is not None:
                # A collective still hangs in this communicator, so no other may take it.
                self.group.is_broken = True
            self._thread = None
        self.broken = self.broken or ExchangeError(
            "these local steps were closed: call local_steps again to go on"
        )
