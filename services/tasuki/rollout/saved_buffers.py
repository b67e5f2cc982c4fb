"""Saves non-weight buffers across a pause."""

from collections.abc import Sequence

import numpy as np
import torch

Span = tuple[int, int]
"""Address and bytes."""


class KeptContent:
    """A host copy of spans of device memory, over a pause. On a GPU it is pinned, taken once and reused."""

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._host = torch.empty(0, dtype=torch.uint8)

    @property
    def host_bytes(self) -> int:
        return self._host.numel()

    def save(self, spans: Sequence[Span], *, device: str) -> None:
        """Starts the copies; they are done when the device is idle, which a pause waits for before it takes pages."""
        total_bytes = sum(num_bytes for _, num_bytes in spans)
        if self._host.numel() != total_bytes:
            self._host = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
        copies = self._host.split([num_bytes for _, num_bytes in spans])
        self._pieces = [(memory_at(span, device=device), copy) for span, copy in zip(spans, copies, strict=True)]
        for memory, copy in self._pieces:
            copy.copy_(memory, non_blocking=True)

    def restore(self) -> None:
        for memory, copy in self._pieces:
            memory.copy_(copy, non_blocking=True)


def without(blocks: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The parts of `blocks` that lie in none of `holes`, in the order of their addresses."""
    left: list[Span] = []
    ends = sorted((start, start + num_bytes) for start, num_bytes in holes)
    for start, num_bytes in sorted(blocks):
        at, end = start, start + num_bytes
        for hole_start, hole_end in ends:
            if hole_end <= at:
                continue
            if hole_start >= end:
                break
            if hole_start > at:
                left.append((at, hole_start - at))
            at = hole_end
        if at < end:
            left.append((at, end - at))
    return left


def memory_at(span: Span, *, device: str) -> torch.Tensor:
    """The bytes at an address as a tensor that does not own them."""
    view = _MemoryView(span)
    return torch.from_numpy(np.asarray(view)) if device == "cpu" else torch.as_tensor(view, device=device)


class _MemoryView:
    def __init__(self, span: Span) -> None:
        address, num_bytes = span
        self.__array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
        self.__cuda_array_interface__ = self.__array_interface__


def span_of(tensor: torch.Tensor) -> Span:
    """From the tensor's first byte to its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
