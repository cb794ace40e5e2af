"""OrderedThread: one thread that runs jobs in the order in which they were submitted.

Gloo's collectives block. In a thread they overlap with the backward pass, and one thread keeps
their order the same on every rank.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

_Job = Callable[[], None]
PATIENCE = 10.0
"""Seconds that `close` waits for the thread to end."""


class OrderedThread:
    """A thread that runs jobs one after another. A submitted job must not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # The thread holds the queue, not this object, so that dropping the object can end it.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> None:
        """Run `job` in the thread after all earlier jobs."""
        self._jobs.put(job)

    def wait(self, job: _Job) -> None:
        """Run `job` after all earlier jobs, wait for its end, and raise its error here."""
        answer: Future[None] = Future()

        def report() -> None:
            try:
                job()
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        self.submit(report)
        answer.result()

    def close(self) -> bool:
        """Finish the jobs that were submitted, and end the thread.

        Return False if the thread is still busy after PATIENCE seconds, as in a collective that
        never returns.
        """
        self._jobs.put(None)
        if self._thread is threading.current_thread():
            return True
        self._thread.join(timeout=PATIENCE)
        return not self._thread.is_alive()


def _serve(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        # Else the variable would keep the last job, and all that it refers to, until the next one.
        del job
