"""Runs a State's steps beside DDP's backward pass: on a side stream, or in one ordered thread."""

import contextlib
import logging
import warnings
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.accumulate import Bundle
from gradwire.errors import AttachError, DriftError, ExchangeError
from gradwire.integrate.buckets import Buckets, UsedParameters, Waiting
from gradwire.integrate.handshake import meet
from gradwire.integrate.ordered import OrderedThread
from gradwire.plan.auto import Auto
from gradwire.stages import timed_by
from gradwire.state import State
from gradwire.types import Slot

log = logging.getLogger("gradwire")


class Engine:
    """Buckets in, Futures out.

    NCCL: the work is enqueued on a side stream by the hook itself; no thread, no host sync. Gloo:
    one ordered thread does it, because a blocking collective inside a hook stops the backward
    pass and inside a Future's callback can hang.
    """

    def __init__(self, state: State, *, watch_unused: bool) -> None:
        self._state = weakref.proxy(state)
        self._watch_unused = watch_unused
        self._names = state.model_names
        self._used: UsedParameters | None = None
        self._thread: OrderedThread | None = None
        self._stream: torch.cuda.Stream | None = None
        self.broken: Exception | None = None
        """What ended the exchange; autograd passes on its words, but not its kind."""
        self._early: list[tuple[dist.GradBucket, Future[object]]] = []

    def open(self, parameters: Sequence[Tensor]) -> None:
        """Meet the other ranks and allocate the residuals. A collective call."""
        if not parameters:
            raise AttachError("the model has no parameter that needs a gradient")
        state = self._state
        if self._names is None:
            self._names = {id(p): f"p{i}" for i, p in enumerate(parameters)}
        slots = [slot_of(p, self._names[id(p)]) for p in parameters]
        device = parameters[0].device
        bounds = {"bounds of method='auto'": None if state.auto is None else state.auto.bounds}
        group = meet(state.process_group, state.config, slots, device, bounds)
        state.open(slots, device, group)
        # Where one parameter may be left out, or norms are added up, each is a piece of its own:
        # DDP cuts its buckets anew after the first step, and a sum must not depend on that.
        merge = not self._watch_unused and not state.config.clip
        self._buckets = Buckets(state, self._names, merge=merge)
        if self._watch_unused:
            self._used = UsedParameters(parameters, self._names)
        if device.type == "cuda":
            # The backward pass has plenty to do meanwhile; what waits for the network goes first.
            self._stream = torch.cuda.Stream(device, priority=-1)
        if not group.on_stream:
            self._thread = OrderedThread("gradwire")
            weakref.finalize(self, self._thread.close)

    def close(self) -> None:
        """End the thread. Afterwards nothing is exchanged any more."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._used is not None:
            self._used.remove()
        self.broken = self.broken or ExchangeError("the wire was closed")

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The averaged bucket, in time; called by DDP's backward pass in bucket order."""
        raw: Future[object] = Future(devices=[self._stream.device] if self._stream else None)
        answer = raw.then(_unwrap)
        if self.broken is not None:
            raw.set_result(self.broken)
            return answer
        if not self._state.opened and not self._first_step(bucket, raw):
            return answer
        for early, future in self._early or [(bucket, raw)]:
            self._arrive(early, future)
        self._early = []
        return answer

    def _first_step(self, bucket: dist.GradBucket, raw: "Future[object]") -> bool:
        """Without a model the parameters are known when the first step's last bucket is here."""
        self._early.append((bucket, raw))
        if not bucket.is_last():
            return False
        order = [b for b, _ in self._early]
        if self._names is not None:
            by_id = {id(p): p for b in order for p in b.parameters()}
            parameters = [by_id[i] for i in reversed(self._names) if i in by_id]
        else:
            parameters = [p for b in order for p in b.parameters()]
        self.open(parameters)
        return True

    def _arrive(self, bucket: dist.GradBucket, future: "Future[object]") -> None:
        if bucket.index() == 0:
            self._begin()
        if self._state.auto is not None and bucket.is_last():
            self._state.auto.mark("last")
        for bundle in self._buckets.arrive(bucket, future):
            self._start(bundle)

    def _begin(self) -> None:
        if self._buckets.abandon():
            warnings.warn(
                "the last backward pass did not finish; its gradients are dropped", stacklevel=2
            )
        self._buckets.reset()
        if self._state.watch is not None:
            self._check_drift()
        with self._side_stream():
            self._state.begin()
        if self._state.auto is not None:
            self._measure(self._state.auto)

    def _measure(self, auto: Auto) -> None:
        """One step more for `auto`; after the last one it says how to go on."""
        auto.begin(self._state.clock)
        if not auto.due:
            return
        if self._thread is None:
            with self._side_stream():
                self._state.settle_auto()
        else:
            ready = self._ready()
            self._thread.wait(lambda: self._settle_auto(ready))
        self._buckets.reset()

    def _settle_auto(self, ready: "torch.cuda.Event | None") -> None:
        with self._side_stream(ready), torch.no_grad():
            self._state.settle_auto()

    def _check_drift(self) -> None:
        """Waits for the answer: an error raised from the hook itself keeps its type."""
        if self._thread is None:
            self._look()
            return
        ready = self._ready()
        self._thread.wait(lambda: self._look(ready))

    def _look(self, ready: "torch.cuda.Event | None" = None) -> None:
        try:
            with self._side_stream(ready):
                self._state.check_drift()
        except DriftError:
            raise
        except Exception:
            self._state.group.give_up()
            raise

    def _ready(self) -> "torch.cuda.Event | None":
        """When the backward pass so far is done."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._stream.device).record_event()

    def _start(self, bundle: Bundle) -> None:
        """Process a complete bundle, here or in the thread."""
        if self._thread is None:
            self._process(bundle)
            return
        ready = self._ready()
        self._thread.submit(lambda: self._process(bundle, ready))

    def _process(self, bundle: Bundle, ready: "torch.cuda.Event | None" = None) -> None:
        if self.broken is not None:
            return
        try:
            with self._side_stream(ready):
                done = self._exchange(bundle)
                for waiting in done:
                    waiting.future.set_result(waiting.buffer)
        except Exception as error:
            self._fail(bundle, error)

    @torch.no_grad()
    def _exchange(self, bundle: Bundle) -> list[Waiting]:
        state = self._state
        if not state.group.on_stream:
            entries = state.choose(bundle).k
            with timed_by(state.clock, bundle.index):
                state.group.agree(
                    "exchange", step=state.steps, bundle=bundle.index, entries=entries
                )
        unused: list[Slot] = []
        if self._used is not None:
            unused = self._used.unused_everywhere(bundle, state)
        state.replace(bundle, self._buckets.pieces(bundle), unused)
        done = self._buckets.finish(bundle)
        if state.auto is not None and self._buckets.idle:
            state.auto.mark("done")
        if self._used is not None and self._buckets.idle:
            self._used.clear()
        return done

    def _fail(self, bundle: Bundle, error: Exception) -> None:
        """Nobody may wait for ever: answer every bucket with the error, and release the peers."""
        self.broken = ExchangeError(
            f"rank {self._state.group.rank}, step {self._state.steps}, bundle {bundle.index} "
            f"({bundle.slots[0].name} ...): {error}"
        )
        # The error crosses into autograd as text only; here is the last place to see its origin.
        log.error("%s", self.broken, exc_info=error)
        self._state.group.give_up()
        for waiting in self._buckets.abandon():
            waiting.future.set_result(self.broken)

    def _side_stream(
        self, ready: "torch.cuda.Event | None" = None
    ) -> contextlib.AbstractContextManager[object]:
        """Work in here is ordered after the backward pass so far, but does not hold it up."""
        if self._stream is None:
            return contextlib.nullcontext()
        if ready is not None:
            self._stream.wait_event(ready)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)


def slot_of(parameter: Tensor, name: str) -> Slot:
    """The slot of a parameter, before it has a place."""
    return Slot(
        name, tuple(parameter.shape), parameter.stride(), parameter.dtype, numel=parameter.numel()
    )


def _unwrap(future: "Future[object]") -> Tensor:
    """The result, or the error raised where autograd waits for it."""
    value = future.value()
    if isinstance(value, Exception):
        raise value
    assert isinstance(value, Tensor)
    return value
