"""A fake of NVML's Python library."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class Library(SimpleNamespace):
    """Two GPUs; the second one does not list its processes."""

    NVMLError = NVMLError

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

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if handle:
            raise NVMLError
        return [SimpleNamespace(pid=7, usedGpuMemory=None), SimpleNamespace(pid=8, usedGpuMemory=3)]
