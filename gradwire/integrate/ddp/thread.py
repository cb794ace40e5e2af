"""One thread that does things in the order they were asked for.

Gloo's collectives block. In a thread they overlap with the backward pass, and one thread keeps
their order the same on every rank.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Job = Callable[[], None]
PATIENCE = 10.0


class OrderedThread:
    """Runs jobs one after another. A job must not raise: it reports to whoever waits for it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # The thread holds the queue, not this object, so that dropping the object can end it.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def wait(self, job: Job) -> None:
        """Run `job` after what was submitted before, and wait for it; raises what it raises."""
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
        """Finish what was submitted and end; a collective that never returns is not waited for.

        Returns whether the thread is done with everything.
        """
        self._jobs.put(None)
        if self._thread is threading.current_thread():
            return True
        self._thread.join(timeout=PATIENCE)
        return not self._thread.is_alive()


def _serve(jobs: "queue.SimpleQueue[Any]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
