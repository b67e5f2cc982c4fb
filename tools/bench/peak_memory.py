"""GPU memory in use while a block runs, as the driver reports it."""

import threading
from collections.abc import Sequence
from typing import Any

import pynvml


class PeakMemory:
    """Peak memory in use on each GPU while the block runs, above that before; the driver is polled throughout."""

    def __init__(self, gpu_uuids: Sequence[str]) -> None:
        self._nvml: Any = pynvml
        self._nvml.nvmlInit()
        self._gpus = [self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in gpu_uuids]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "PeakMemory":
        self._before = self._used()
        self._peak = self._before
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        """Extra bytes at the peak, on the GPU with the largest increase."""
        return max(peak - before for peak, before in zip(self._peak, self._before, strict=True))

    def _used(self) -> list[int]:
        return [self._nvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in self._gpus]

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self._peak = list(map(max, self._peak, self._used()))
