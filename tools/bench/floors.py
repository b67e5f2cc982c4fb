"""Lower bounds for the copies of a sync, measured on the ranks that make them."""

import time
from collections.abc import Callable
from typing import Any

import torch

from tasuki.rollout.receive import WeightReceiver
from tasuki.weights.copies import DeviceCopies


class Floors:
    """Other ways to move the bytes of a receiver's plan, in the same process."""

    def __init__(self, receiver: WeightReceiver, device: torch.device) -> None:
        prepared: Any = receiver._prepared
        imported: Any = receiver._imported
        assert isinstance(prepared._copies, DeviceCopies)
        self._copies = prepared._copies._copies
        self._arenas = {arena.manifest.rank: arena for arena in imported._arenas}
        self._first_owner = imported.first_owner(device)
        self._local = (self._first_owner - 1) % len(self._arenas)
        self._prepared, self._device = prepared, device

    def within(self) -> dict[str, float]:
        """GB/s of a device copy, counted once."""
        num_bytes = 4 << 30
        source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2))
        milliseconds = best_ms(lambda: target.copy_(source))
        local = sum(copy.source.nbytes for copy in self._copies if copy.owner == self._local)
        total = sum(copy.source.nbytes for copy in self._copies)
        return {"gb_s": num_bytes / milliseconds / 1e6, "bytes": total, "remote_bytes": total - local}

    def across(self) -> dict[str, float]:
        """GB/s from all other owners at once, in large copies."""
        sources = [
            max(arena.tensors, key=lambda tensor: tensor.nbytes)
            for rank, arena in sorted(self._arenas.items(), key=lambda one: (one[0] - self._local) % len(self._arenas))
            if rank != self._local
        ]
        targets = [torch.empty_like(source) for source in sources]
        streams = [torch.cuda.Stream() for _ in sources]

        def pull() -> None:
            for _ in range(4):
                for source, target, stream in zip(sources, targets, streams, strict=True):
                    with torch.cuda.stream(stream):
                        target.copy_(source, non_blocking=True)

        return {"gb_s": 4 * sum(source.nbytes for source in sources) / best_ms(pull) / 1e6}


def best_ms(call: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def floor_ms(case: dict[str, Any]) -> float:
    """Lower bound of the slowest rank: writing its bytes, or fetching those on other GPUs."""
    floors: list[float] = []
    for rank, within in enumerate(case["floors"]["within"]):
        times = [within["bytes"] / within["gb_s"] / 1e6]
        if "across" in case["floors"]:
            times.append(within["remote_bytes"] / case["floors"]["across"][rank]["gb_s"] / 1e6)
        floors.append(max(times))
    return max(floors)
