"""Engine: run a State's steps beside DDP's backward pass, in one thread and on a side stream.

The hook only makes a Future for each bucket and submits the bucket to the thread. The thread sorts
buckets into bundles, exchanges each complete bundle, and answers the Futures.
"""

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
from gradwire.integrate.attached import closed_error, live_state
from gradwire.integrate.ddp.buckets import Buckets, UsedParameters, WaitingBucket
from gradwire.integrate.ddp.order import Accumulator, stride_of
from gradwire.integrate.ddp.thread import OrderedThread
from gradwire.integrate.handshake import handshake
from gradwire.ranks.group import Group
from gradwire.stages import timed_by
from gradwire.state.state import State
from gradwire.types import Slot

if TYPE_CHECKING:
    from gradwire.plan.auto import Auto

log = logging.getLogger("gradwire")

_Arrival = tuple[dist.GradBucket, "Future[object]"]
"""A bucket, and the Future that answers it."""


class Engine:
    """The exchange of one State under DDP: buckets in, Futures of averaged buckets out.

    One ordered thread does the work. With NCCL the thread only enqueues kernels on a side stream.
    Enqueueing in the hook would delay the launches of the backward pass. With Gloo the collectives
    block: in the hook they would stop the backward pass, and in a Future's callback they can hang.
    Only the last bucket on the CPU is processed in the hook: the backward pass has ended by then.

    watch_unused: exchange the parameters that no rank used, and keep their residuals.
    refuse_unused: raise for a parameter without a gradient, from the second step on.
    """

    def __init__(
        self, state: State, *, watch_unused: bool = False, refuse_unused: bool = False
    ) -> None:
        self._owner = weakref.ref(state)
        self._watch_unused = watch_unused
        self._refuse_unused = refuse_unused
        self._names = state.model_names
        self._used: UsedParameters | None = None
        self._accumulator: Accumulator | None = None
        self._thread: OrderedThread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._group: Group | None = None
        self._is_inside = False
        """True from the first bucket of a backward pass to its last."""
        self.broken: Exception | None = None
        """The error that ended the exchange."""
        self._pending_buckets: list[_Arrival] = []
        """The buckets of the first step, until `open` has been called."""

    @property
    def _state(self) -> State:
        return live_state(self._owner)

    def open(self, parameters: Sequence[Tensor]) -> None:
        """Compare settings with the other ranks, and allocate the residuals. A collective call."""
        if not parameters:
            raise AttachError("the model has no parameter that needs a gradient")
        state = self._state
        if self._names is None:
            self._names = {id(p): f"p{i}" for i, p in enumerate(parameters)}
        slots = [slot_of(p, self._names[id(p)]) for p in parameters]
        device = parameters[0].device
        settings = self._handshake_settings()
        group = handshake(state.process_group, state.config, slots, device, settings)
        self._group = group
        state.open(slots, device, group)
        # If a parameter can be left out, or norms are summed, each parameter is a separate piece:
        # DDP builds its buckets anew after the first step, and a sum must not depend on that.
        merge = not self._watch_unused and not state.config.clip
        self._buckets = Buckets(state, self._names, merge=merge)
        self._accumulator = Accumulator(parameters[0], self._refuse_converted)
        if self._watch_unused or self._refuse_unused:
            self._used = UsedParameters(parameters, self._names)
        if device.type == "cuda":
            # The network waits for these kernels, so they go before those of the backward pass.
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._thread = OrderedThread("gradwire")
        self._thread.submit(self._set_up_thread)

    def _handshake_settings(self) -> dict[str, object]:
        """Return the settings beside the Config that all ranks must have alike."""
        state = self._state
        return {
            "bounds of method='auto'": None if state.auto is None else state.auto.bounds,
            "unused parameters (find_unused_parameters, static_graph)": self._watch_unused,
            **state.status.handshake_settings(),
        }

    def close(self) -> None:
        """End the thread and the exchange. A State that is dropped, or the process, does so too."""
        if self._is_inside:
            self._stop_inside("its backward pass did not finish")
        if self._thread is not None:
            if not self._thread.close() and self._group is not None:
                # A collective still hangs in this communicator, so no other wire may take it.
                self._group.is_broken = True
            self._thread = None
        for hooks in (self._used, self._accumulator):
            if hooks is not None:
                hooks.remove()
        self.broken = self.broken or closed_error()

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Return a Future of the averaged bucket; DDP's backward pass calls it in bucket order."""
        raw: Future[object] = Future(devices=[self._stream.device] if self._stream else None)
        answer = raw.then(_result_of)
        if self.broken is not None:
            raw.set_result(self.broken)
            return answer
        try:
            self._is_inside = True
            self._take(bucket, raw)
            self._is_inside = not bucket.is_last()
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C
                self._stop_inside(type(error).__name__)
            raise
        return answer

    def _take(self, bucket: dist.GradBucket, raw: "Future[object]") -> None:
        """Have a bucket processed; `raw` answers it."""
        if not self._state.opened and not self._open_with_last(bucket, raw):
            return
        if self._state.watch is not None and bucket.index() == 0:
            self._check_drift()
        if self._state.auto is not None:
            self._mark_compute(bucket, self._state.auto)
        ready = self._record_ready()
        refusal = self._unused_refusal(bucket)
        for arrival in self._pending_buckets or [(bucket, raw)]:
            self._submit(arrival, ready, refusal)
        self._pending_buckets = []

    def _refuse_converted(self) -> None:
        """Raise AttachError, because DDP has lost the parameters; the other ranks are told."""
        self._stop_inside("its model was converted after DistributedDataParallel")
        raise AttachError(
            "the model was converted to another dtype or device after DistributedDataParallel, "
            "which from then on averages no gradient: convert the model first"
        )

    def _stop_inside(self, why: str) -> None:
        """End the exchange in the middle of a backward pass, and release the other ranks at once.

        why: the reason that the other ranks are told.
        """
        self._is_inside = False
        if self.broken is None and self._group is not None:
            self.broken = ExchangeError(f"rank {self._group.rank} has stopped: {why}")
            self._group.give_up(why)

    def _open_with_last(self, bucket: dist.GradBucket, raw: "Future[object]") -> bool:
        """Keep a bucket of the first step; open and return True with the last bucket.

        Without a model, the buckets are the only list of the parameters.
        """
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
        """Compare the replicas, and wait: only an error that the hook raises keeps its type."""
        assert self._thread is not None
        ready = self._record_ready()
        self._thread.wait(lambda: self._check_drift_in_thread(ready))

    def _check_drift_in_thread(self, ready: "torch.cuda.Event | None") -> None:
        try:
            self._wait_for(ready)
            self._state.check_drift()
        except DriftError:
            raise
        except Exception:
            self._state.group.give_up()
            raise

    def _mark_compute(self, bucket: dist.GradBucket, auto: "Auto") -> None:
        """Note the time of the first and the last bucket; the thread may see buckets later."""
        if bucket.index() == 0:
            auto.begin(self._state.clock)
        if bucket.is_last():
            auto.mark("last")

    def _unused_refusal(self, bucket: dist.GradBucket) -> str:
        """Return the error text for parameters without a gradient; empty before the last bucket.

        It is empty in the first step too. No residual exists yet that DDP could throw away.
        """
        if (
            not self._refuse_unused
            or self._used is None
            or not bucket.is_last()
            or self._pending_buckets
        ):
            return ""
        refusal = self._used.refusal()
        self._used.clear()
        return refusal

    def _record_ready(self) -> "torch.cuda.Event | None":
        """Record an event after the backward pass so far; return None on the CPU."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._stream.device).record_event()

    def _submit(self, arrival: _Arrival, ready: "torch.cuda.Event | None", refusal: str) -> None:
        """Have a bucket processed: in the thread, or here for the last bucket on the CPU."""
        assert self._thread is not None
        bucket = arrival[0]
        if self._stream is not None or not bucket.is_last():
            self._thread.submit(lambda: self._process_bucket(*arrival, ready, refusal))
            return
        # On the CPU nothing is left to overlap with, and waking the thread takes 0.1 ms.
        if bucket.index():
            self._thread.wait(lambda: None)
        with torch.no_grad():
            self._process_bucket(*arrival, ready, refusal)

    # --- in the thread, or in its place -------------------------------------------------------

    def _set_up_thread(self) -> None:
        """Run this thread without autograd and on the side stream."""
        torch.set_grad_enabled(False)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def _wait_for(self, ready: "torch.cuda.Event | None") -> None:
        """Let kernels that are enqueued later wait for `ready`."""
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready)

    def _process_bucket(
        self,
        bucket: dist.GradBucket,
        future: "Future[object]",
        ready: "torch.cuda.Event | None",
        refusal: str,
    ) -> None:
        """Take in a bucket, and process the bundles that are complete with it."""
        state = self._owner()  # which stays as long as this function
        if self.broken is not None or state is None:
            future.set_result(self.broken or closed_error())
            return
        stage = "the beginning"
        try:
            if refusal:
                stage = "the last bucket"
                raise AttachError(refusal)
            self._wait_for(ready)
            if bucket.index() == 0:
                self._begin_step()
            for bundle in self._buckets.add_bucket(bucket, future):
                stage = f"bundle {bundle.index} ({bundle.slots[0].name} ...)"
                for waiting in self._exchange(bundle):
                    waiting.future.set_result(waiting.buffer)
        except Exception as error:
            self._fail(stage, future, error)

    def _begin_step(self) -> None:
        if self._buckets.drop_waiting():
            warnings.warn(
                "the last backward pass did not finish; its gradients are dropped", stacklevel=2
            )
        self._buckets.reset()
        self._state.begin()
        if self._state.auto is not None and self._state.auto.due:
            self._state.settle_auto()
            # The chosen config has other bundles.
            self._buckets.reset()

    def _exchange(self, bundle: Bundle) -> list[WaitingBucket]:
        """Average a bundle in its buckets, and return the buckets that are done."""
        state = self._state
        with timed_by(state.clock, bundle.index):
            state.agree("exchange", bundle)
        unused: list[Slot] = []
        if self._used is not None and self._watch_unused:
            unused = self._used.unused_everywhere(bundle, state)
        state.replace(bundle, self._buckets.pieces(bundle), unused)
        done = self._buckets.finish_bundle(bundle)
        if state.auto is not None and self._buckets.is_done:
            state.auto.mark("done")
        if self._used is not None and self._watch_unused and self._buckets.is_done:
            self._used.clear()
        return done

    def _fail(self, stage: str, future: "Future[object]", error: Exception) -> None:
        """End the exchange: answer every bucket with the error, and release the other ranks.

        Otherwise autograd here and the other ranks would wait for ever.
        """
        if self.broken is not None:
            # Ctrl-C has broken the connections, which ends the collective of the thread.
            future.set_result(self.broken)
            return
        state = self._state
        self.broken = ExchangeError(
            f"rank {state.group.rank}, step {state.steps}, {stage}: {error}"
        )
        # The error crosses into autograd as text only; here is the last place to see its origin.
        log.error("%s", self.broken, exc_info=error)
        state.group.give_up()
        for unanswered in (future, *(bucket.future for bucket in self._buckets.drop_waiting())):
            if not unanswered.done():
                unanswered.set_result(self.broken)


def slot_of(parameter: Tensor, name: str) -> Slot:
    """Return the slot of a parameter, without an offset yet."""
    shape, stride = tuple(parameter.shape), stride_of(parameter)
    return Slot(name, shape, stride, parameter.dtype, numel=parameter.numel())


def _result_of(future: "Future[object]") -> Tensor:
    """Return the averaged bucket, or raise its error where autograd waits for the bucket."""
    value = future.value()
    if isinstance(value, Exception):
        raise value
    assert isinstance(value, Tensor)
    return value
