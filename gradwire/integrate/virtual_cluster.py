"""VirtualCluster: the gradient averaging of a data-parallel job, in one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.config import Config
from gradwire.errors import ConfigError, StateError
from gradwire.ranks.virtual import VirtualRanks
from gradwire.state.saved import plain
from gradwire.state.state import State
from gradwire.state.stats import Stats
from gradwire.types import Slot


class VirtualCluster:
    """`world_size` virtual workers that average flat gradients as real ranks would.

        cluster = gradwire.VirtualCluster(4, method="topk", density=0.01)
        update = cluster.average([torch.randn(1000) for _ in range(4)])
        kept = cluster.residual(0)

    The workers run the same exchange code as ranks of torch.distributed, on the device of the
    gradients. Unlike attach, a cluster compresses small bundles too, unless `dense_below` is given.
    """

    def __init__(self, world_size: int, config: Config | None = None, **fields: Any) -> None:
        if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
            raise ConfigError(
                f"world_size must be a whole number of at least 1, got {world_size!r}"
            )
        if config is None:
            fields.setdefault("dense_below", 0)
        self.world_size = world_size
        self._ranks = VirtualRanks(world_size)
        self._states = [State(config, **fields) for _ in range(world_size)]
        self._size = 0

    @property
    def config(self) -> Config:
        return self._states[0].config

    def average(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the update that every worker gets.

        gradients: a flat tensor per worker, which stays unchanged.
        """
        self._check(gradients)
        first = gradients[0]
        if not self._states[0].opened:
            self._open(first)

        def work(rank: int) -> Tensor | None:
            state = self._states[rank]
            state.begin()
            update = state.process(state.bundles[0], [gradients[rank].detach().contiguous()])
            # Every worker computes the same update, so one copy is enough.
            return update if rank == 0 else None

        update = self._ranks.run(work)[0]
        assert update is not None
        return update[: self._size]

    def residual(self, rank: int) -> Tensor:
        """Return a copy of a worker's residual, flat."""
        return self._state(rank).residual("gradient")

    def stats(self, rank: int = 0) -> Stats:
        """Return a worker's numbers so far."""
        return self._state(rank).stats()

    def _state(self, rank: int) -> State:
        if rank not in range(self.world_size):
            raise ConfigError(f"rank must be in 0..{self.world_size - 1}, got {rank!r}")
        return self._states[rank]

    def flush(self) -> None:
        """Send all residuals with the next step."""
        for state in self._states:
            state.flush()

    def follow_lr(self, lr: float) -> None:
        """Apply every gradient at the learning rate of its own step; `lr` is the next step's."""
        for state in self._states:
            state.follow_lr(lr)

    def skip_step(self) -> None:
        """Put back what the last step delivered, because the optimiser did not take it."""
        for state in self._states:
            state.skip_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all workers."""
        return {"workers": [state.state_dict() for state in self._states]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, with the same number of workers."""
        workers = saved.get("workers") if isinstance(saved, dict) else None
        if not isinstance(workers, list):
            raise StateError("the state of a cluster is {'workers': [one state a worker]}")
        if len(workers) != self.world_size:
            raise ConfigError(
                f"the state has {len(workers)} workers, the cluster {self.world_size}"
            )
        if not self._states[0].opened:
            try:
                like = workers[0]["residual"]["gradient"].float().flatten()
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise StateError("the state has no residual of the parameter 'gradient'") from error
            self._open(like)
        pairs = list(zip(self._states, workers, strict=True))
        for state, part in pairs:
            plain.check_state(state, part)
            plain.check_rank(state, part)
        # Most programs that import gradwire load nothing.
        from gradwire.state.saved.alike import common_digests, compare_digests

        compare_digests([common_digests(part) for part in workers])
        for state, part in pairs:
            plain.resume(state, part)

    def _open(self, like: Tensor) -> None:
        self._size = like.numel()
        slot = Slot("gradient", (self._size,), (1,), like.dtype, numel=self._size)
        for rank, state in enumerate(self._states):
            state.open([slot], like.device, self._ranks.groups[rank])

    def _check(self, gradients: Sequence[Tensor]) -> None:
        if len(gradients) != self.world_size:
            raise ConfigError(
                f"average takes one gradient a worker: {self.world_size}, got {len(gradients)}"
            )
        first = gradients[0]
        wanted = (self._size,) if self._size else tuple(first.shape)
        for rank, gradient in enumerate(gradients):
            if gradient.dim() != 1 or tuple(gradient.shape) != wanted or not gradient.numel():
                raise ConfigError(
                    f"gradient {rank} has shape {tuple(gradient.shape)}, expected flat {wanted}"
                )
            if gradient.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ConfigError(f"gradient {rank} is {gradient.dtype}: use fp32, bf16 or fp16")
