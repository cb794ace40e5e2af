"""Vectors: x and outer momentum by parameter, on the device or offloaded to the host's memory."""

from collections.abc import ItemsView, Iterable, Mapping, ValuesView

import torch
from torch import Tensor


class Vectors(dict[str, Tensor]):
    """fp32 tensors by parameter, on the device, where `fetch` returns them and `store` is free.

    They begin as zeros.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        super().__init__({n: self._make(shape, device) for n, shape in shapes.items()})

    def _make(self, shape: torch.Size, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def put(self, name: str, tensor: Tensor) -> None:
        """Take over the values of a tensor from anywhere."""
        self[name].copy_(tensor)

    def prefetch(self, names: Iterable[str]) -> None:
        """Begin to copy tensors to the device."""

    def fetch(self, name: str) -> Tensor:
        """Return a tensor on the device, which may be changed there until `store` or `drop`."""
        return self[name]

    def store(self, name: str) -> None:
        """Keep the fetched tensor as it is now."""

    def drop(self, names: Iterable[str]) -> None:
        """Let go of fetched tensors that were not changed."""


class HostVectors(Vectors):
    """The same in the host's memory, which is pinned beside CUDA.

    A tensor is on the device only while an exchange needs it. On CUDA copies run on two streams of
    their own, beside what the device computes: one brings tensors, the other takes them back.
    Tensors that the host asks for are complete, because it waits for the copies first.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        super().__init__(shapes, device)
        self._device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._here: dict[str, Tensor] = {}
        """Tensors on the device, or on their way there."""
        self._arrivals: dict[str, torch.cuda.Event] = {}
        self._departures: dict[str, torch.cuda.Event] = {}
        """The end of the last copy of each tensor to the device, and to the host."""

    def _make(self, shape: torch.Size, device: torch.device) -> Tensor:
        pinned = device.type == "cuda"
        return torch.zeros(shape, dtype=torch.float32, pin_memory=pinned, device="cpu")

    def put(self, name: str, tensor: Tensor) -> None:
        self.drop([name])
        super().put(name, tensor)

    def prefetch(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._here:
                self._bring(name)

    def _bring(self, name: str) -> None:
        host = super().__getitem__(name)
        if self._streams is None:
            self._here[name] = host.to(self._device, copy=True)
            return
        stream, _ = self._streams
        with torch.cuda.stream(stream):
            if name in self._departures:
                stream.wait_event(self._departures[name])
            self._here[name] = host.to(self._device, non_blocking=True)
            self._arrivals[name] = stream.record_event()

    def fetch(self, name: str) -> Tensor:
        self.prefetch([name])
        tensor = self._here[name]
        if self._streams is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(self._arrivals[name])
            # It was allocated on the stream that brought it.
            tensor.record_stream(here)
        return tensor

    def store(self, name: str) -> None:
        tensor, host = self._here.pop(name), super().__getitem__(name)
        if self._streams is None:
            host.copy_(tensor)
            return
        _, stream = self._streams
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
            self._departures[name] = stream.record_event()
        tensor.record_stream(stream)

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._here.pop(name, None)

    # --- what the host reads ----------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until every copy to the host has ended; fetched tensors may be old afterwards."""
        for event in list(self._departures.values()):
            event.synchronize()

    def __getitem__(self, name: str) -> Tensor:
        self._wait()
        return super().__getitem__(name)

    def items(self) -> ItemsView[str, Tensor]:  # type: ignore[override]
        self._wait()
        return super().items()

    def values(self) -> ValuesView[Tensor]:  # type: ignore[override]
        self._wait()
        return super().values()
