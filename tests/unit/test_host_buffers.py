"""Pinning of host buffers: all or none, with CUDA's runtime replaced by one that refuses."""

from __future__ import annotations

import pytest
import torch

from tasuki.trainer.backends.fsdp.host_buffers import pin


class Runtime:
    """Pins up to `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.pinned = room, dict[int, int]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert (address not in self.pinned, flags) == (True, 0)
        if sum(self.pinned.values()) + num_bytes > self.room:
            return 2  # cudaErrorMemoryAllocation
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.mark.parametrize(("room", "is_pinned"), [(300, True), (299, False), (50, False)])
def test_all_buffers_are_pinned_or_none(room: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(room)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffers = [torch.empty(100, dtype=torch.uint8) for _ in range(3)]
    assert pin(buffers) is is_pinned
    assert list(runtime.pinned) == ([buffer.data_ptr() for buffer in buffers] if is_pinned else [])
