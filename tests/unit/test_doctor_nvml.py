"""Queries of `tasuki doctor` to NVML, answered by a fake library."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tasuki.doctor.gpus import GpuFacts, read_gpu_facts


class NVMLError(Exception):
    pass


class Library(SimpleNamespace):
    """Two GPUs without peer access; the second one does not list its processes."""

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_READ = (0,)
    NVML_P2P_STATUS_OK = 0

    def nvmlInit(self) -> None:
        if self.is_missing:
            raise NVMLError

    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=100, free=90 - handle)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H100"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if handle:
            raise NVMLError
        return [SimpleNamespace(pid=7, usedGpuMemory=None), SimpleNamespace(pid=8, usedGpuMemory=3)]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        assert isinstance(index, int), "ctypes takes no tuple"
        return 3


@pytest.mark.parametrize("is_missing", [False, True])
def test_facts_of_two_gpus(is_missing: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", Library(is_missing=is_missing))
    facts = read_gpu_facts()
    if is_missing:
        assert facts == GpuFacts(None)
        return
    assert facts.driver_cuda == (13, 1) and facts.without_peers == [(0, 1)]
    assert [(gpu.free_bytes, gpu.processes) for gpu in facts.gpus] == [(90, {7: 0, 8: 3}), (89, {})]
