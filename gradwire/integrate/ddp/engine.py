"""Runs a State's steps beside DDP's backward pass: in one ordered thread, on a side stream."""

import logging
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.accumulate import Bundle
from gradwire.errors import AttachError, DriftError, ExchangeError
from gradwire.integrate.attached import alive
from gradwire.integrate.ddp.buckets import Buckets, UsedParameters, Waiting
from gradwire.integrate.ddp.order import stride_of
from gradwire.integrate.ddp.thread import OrderedThread
from gradwire.integrate.handshake import meet
from gradwire.stages import timed_by
from gradwire.state.state import State
from gradwire.types import Slot

if TYPE_CHECKING:
    from gradwire.plan.auto import Auto

log = logging.getLogger("gradwire")

Arrival = tuple[dist.GradBucket, "Future[object]"]


class Engine:
    """Buckets in, Futures out.

    One ordered thread does the work. With NCCL it only enqueues it, on a side stream; but in the
    hook even that would hold up the launches of the backward pass. With Gloo a blocking collective
    inside a hook would stop the backward pass, and inside a Future's callback can hang.
    """

    def __init__(
        self, state: State, *, watch_unused: bool = False, refuse_unused: bool = False
    ) -> None:
        self._owner = weakref.ref(state)
        self._watch_unused = watch_unused
        self._refuse_unused = refuse_unused
        self._names = state.model_names
        self._used: UsedParameters | None = None
        self._thread: OrderedThread | None = None
        self._stream: torch.cuda.Stream | None = None
        self.broken: Exception | None = None
        """The error that ended the exchange."""
        self._pending_buckets: list[Arrival] = []

    @property
    def _state(self) -> State:
        return alive(self._owner)

    def open(self, parameters: Sequence[Tensor]) -> None:
        """Meet the other ranks and allocate the residuals. A collective call."""
        if not parameters:
            raise AttachError("the model has no parameter that needs a gradient")
        state = self._state
        if self._names is None:
            self._names = {id(p): f"p{i}" for i, p in enumerate(parameters)}
        slots = [slot_of(p, self._names[id(p)]) for p in parameters]
        device = parameters[0].device
        group = meet(state.process_group, state.config, slots, device, self._told())
        state.open(slots, device, group)
        # Where one parameter may be left out, or norms are added up, each is a piece of its own:
        # DDP cuts its buckets anew after the first step, and a sum must not depend on that.
        merge = not self._watch_unused and not state.config.clip
        self._buckets = Buckets(state, self._names, merge=merge)
        if self._watch_unused or self._refuse_unused:
            self._used = UsedParameters(parameters, self._names)
        if device.type == "cuda":
            # The backward pass has plenty to do meanwhile; what waits for the network goes first.
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._thread = OrderedThread("gradwire")
        self._thread.submit(self._move_in)
        weakref.finalize(self, self._thread.close)

    def _told(self) -> dict[str, object]:
        """What attach was told beside the Config and ranks have to be told alike."""
        state = self._state
        return {
            "bounds of method='auto'": None if state.auto is None else state.auto.bounds,
            "unused parameters (find_unused_parameters, static_graph)": self._watch_unused,
            **state.status.handshake_settings(),
        }

    def close(self) -> None:
        """End the thread. Afterwards nothing is exchanged any more."""
        if self._thread is not None:
            if not self._thread.close():
                # Nobody else may get a communicator in which a collective still hangs.
                self._state.group.is_broken = True
            self._thread = None
        if self._used is not None:
            self._used.remove()
        self.broken = self.broken or ExchangeError(
            "the wire was closed: to go on with plain all-reduce call wire.detach() instead"
        )

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The averaged bucket, in time; called by DDP's backward pass in bucket order."""
        raw: Future[object] = Future(devices=[self._stream.device] if self._stream else None)
        answer = raw.then(_unwrap)
        if self.broken is not None:
            raw.set_result(self.broken)
            return answer
        if not self._state.opened and not self._first_step(bucket, raw):
            return answer
        if self._state.watch is not None and bucket.index() == 0:
            self._check_drift()
        if self._state.auto is not None:
            self._time(bucket, self._state.auto)
        ready = self._ready()
        refusal = self._refusal(bucket)
        for arrival in self._pending_buckets or [(bucket, raw)]:
            self._submit(arrival, ready, refusal)
        self._pending_buckets = []
        return answer

    def _first_step(self, bucket: dist.GradBucket, raw: "Future[object]") -> bool:
        """Without a model the parameters are known when the first step's last bucket is here."""
        self._pending_buckets.append((bucket, raw))
        if not bucket.is_last():
            return False
        order = [b for b, _ in self._pending_buckets]
        if self._names is not None:
            by_id = {id(p): p for b in order for p in b.parameters()}
            parameters = [by_id[i] for i in reversed(self._names) if i in by_id]
        else:
            parameters = [p for b in order for p in b.parameters()]
        self.open(parameters)
        return True

    def _check_drift(self) -> None:
        """Waits for the answer: an error raised from the hook itself keeps its type."""
        assert self._thread is not None
        ready = self._ready()
        self._thread.wait(lambda: self._look(ready))

    def _look(self, ready: "torch.cuda.Event | None") -> None:
        try:
            self._after(ready)
            self._state.check_drift()
        except DriftError:
            raise
        except Exception:
            self._state.group.give_up()
            raise

    def _time(self, bucket: dist.GradBucket, auto: "Auto") -> None:
        """When a bucket is here: the thread may see it later."""
        if bucket.index() == 0:
            auto.begin(self._state.clock)
        if bucket.is_last():
            auto.mark("last")

    def _refusal(self, bucket: dist.GradBucket) -> str:
        """With the last bucket: what there is to say of parameters that got no gradient.

        The first step's are not known, and nothing is kept for them yet that could be lost.
        """
        if (
            not self._refuse_unused
            or self._used is None
            or not bucket.is_last()
            or self._pending_buckets
        ):
            return ""
        said = self._used.refusal()
        self._used.clear()
        return said

    def _ready(self) -> "torch.cuda.Event | None":
        """When the backward pass so far is done."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._stream.device).record_event()

    # --- in the thread ------------------------------------------------------------------------

    def _submit(self, arrival: Arrival, ready: "torch.cuda.Event | None", refusal: str) -> None:
        assert self._thread is not None
        self._thread.submit(lambda: self._arrive(*arrival, ready, refusal))

    def _move_in(self) -> None:
        """What the thread does is of no gradient and on the side stream, from now on."""
        torch.set_grad_enabled(False)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def _after(self, ready: "torch.cuda.Event | None") -> None:
        """What is enqueued from now on waits for `ready`."""
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready)

    def _arrive(
        self,
        bucket: dist.GradBucket,
        future: "Future[object]",
        ready: "torch.cuda.Event | None",
        refusal: str,
    ) -> None:
        """Take in a bucket, and process the bundles that are complete with it."""
        if self.broken is not None:
            future.set_result(self.broken)
            return
        what = "the beginning"
        try:
            if refusal:
                what = "the last bucket"
                raise AttachError(refusal)
            self._after(ready)
            if bucket.index() == 0:
                self._begin()
            for bundle in self._buckets.arrive(bucket, future):
                what = f"bundle {bundle.index} ({bundle.slots[0].name} ...)"
                for waiting in self._exchange(bundle):
                    waiting.future.set_result(waiting.buffer)
        except Exception as error:
            self._fail(what, future, error)

    def _begin(self) -> None:
        if self._buckets.abandon():
            warnings.warn(
                "the last backward pass did not finish; its gradients are dropped", stacklevel=2
            )
        self._buckets.reset()
        self._state.begin()
        if self._state.auto is not None and self._state.auto.due:
            self._state.settle_auto()
            self._buckets.reset()

    def _exchange(self, bundle: Bundle) -> list[Waiting]:
        state = self._state
        with timed_by(state.clock, bundle.index):
            state.agree("exchange", bundle)
        unused: list[Slot] = []
        if self._used is not None and self._watch_unused:
            unused = self._used.unused_everywhere(bundle, state)
        state.replace(bundle, self._buckets.pieces(bundle), unused)
        done = self._buckets.finish(bundle)
        if state.auto is not None and self._buckets.idle:
            state.auto.mark("done")
        if self._used is not None and self._watch_unused and self._buckets.idle:
            self._used.clear()
        return done

    def _fail(self, what: str, future: "Future[object]", error: Exception) -> None:
        """Nobody may wait for ever: answer every bucket with the error, and release the peers."""
        state = self._state
        self.broken = ExchangeError(f"rank {state.group.rank}, step {state.steps}, {what}: {error}")
        # The error crosses into autograd as text only; here is the last place to see its origin.
        log.error("%s", self.broken, exc_info=error)
        state.group.give_up()
        for one in (future, *(waiting.future for waiting in self._buckets.abandon())):
            if not one.done():
                one.set_result(self.broken)


def slot_of(parameter: Tensor, name: str) -> Slot:
    """The slot of a parameter, before it has a place."""
    shape, stride = tuple(parameter.shape), stride_of(parameter)
    return Slot(name, shape, stride, parameter.dtype, numel=parameter.numel())


def _unwrap(future: "Future[object]") -> Tensor:
    """The result, or the error raised where autograd waits for it."""
    value = future.value()
    if isinstance(value, Exception):
        raise value
    assert isinstance(value, Tensor)
    return value
