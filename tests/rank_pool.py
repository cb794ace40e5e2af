"""A pool of rank processes that lives as long as the test session: imports are paid for once."""

import contextlib
import gc
import multiprocessing
import os
import queue
import tempfile
import traceback
from datetime import timedelta

TIMEOUT = 120
PRELOAD = ["gradwire", "torch._dynamo"]
"""What every rank imports; DDP and optimisers import torch._dynamo when they are made."""


class Ranks:
    """`run(world, function, *args)` calls function(rank, *args) on `world` ranks.

    With `anew` every run has processes of its own, so that no communicator is ever destroyed.
    """

    def __init__(self, size: int, backend: str = "gloo", *, anew: bool = False) -> None:
        self.size = size
        self.backend = backend
        self.anew = anew
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._inboxes = [context.Queue() for _ in range(self.size)]
        self._outbox = context.Queue()
        self._processes = [
            context.Process(
                target=_serve,
                args=(rank, self.backend, self.anew, inbox, self._outbox),
                daemon=True,
            )
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self._processes:
            process.start()

    def run(self, world: int, function, *args):
        """The ranks' results, in rank order; raises if one of them did."""
        store = tempfile.mktemp(prefix="gradwire-test-")
        for rank in range(world):
            self._inboxes[rank].put((function, world, store, args))
        results, failures = {}, {}
        try:
            for _ in range(world):
                rank, ok, value = self._outbox.get(timeout=TIMEOUT)
                (results if ok else failures)[rank] = value
        except queue.Empty:
            self.restart()
            raise AssertionError(f"ranks {set(range(world)) - set(results)} hang") from None
        finally:
            # The last rank to leave its group takes the file away too, at any moment.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(store)
        if self.anew:
            self._leave()
            self._start()
        if failures:
            raise AssertionError("\n".join(f"rank {r}: {t}" for r, t in sorted(failures.items())))
        return [results[rank] for rank in range(world)]

    def _leave(self) -> None:
        """Ranks go by themselves: a client of MPS that is killed may take others with it."""
        for inbox in self._inboxes:
            inbox.put(None)
        for process in self._processes:
            process.join(TIMEOUT)

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, backend: str, anew: bool, inbox, outbox) -> None:
    if backend == "nccl":
        # NCCL refuses two ranks on one GPU when it believes that they share a host.
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": "1"}
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # or the collection after each run looks at all that was imported, for 0.15 s
    while task := inbox.get():
        function, world, store, args = task
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        try:
            outbox.put((rank, True, function(rank, *args)))
        except BaseException:
            outbox.put((rank, False, traceback.format_exc()))
        if not anew:
            gc.collect()
            dist.destroy_process_group()
    os._exit(0)
