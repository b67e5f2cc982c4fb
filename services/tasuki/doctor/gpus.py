"""Checks of `tasuki doctor` on machines with GPUs: driver, compilers, and other processes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasuki.doctor.finding import Finding, fail, ok, warn
from tasuki.wire.extras import install_extras

_STRANGER_BYTES = 1 << 29
"""Memory held by others is reported from this size."""


@dataclass(frozen=True, slots=True)
class Gpu:
    total_bytes: int
    free_bytes: int
    processes: Mapping[int, int]
    """Bytes by pid, in the host's pid namespace."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    driver_cuda: tuple[int, int] | None
    """Latest CUDA version that the driver supports; None without a driver."""
    gpus: Sequence[Gpu] = ()


def gpu_findings(facts: GpuFacts, *, torch_cuda: tuple[int, int] | None, node_runs: bool) -> Iterable[Finding]:
    yield check_driver(facts.driver_cuda, torch_cuda=torch_cuda)
    if facts.driver_cuda is None:
        return
    yield check_compilers(shutil.which("nvcc"), shutil.which("cc") or shutil.which("gcc"))
    yield check_strangers(facts.gpus, node_runs=node_runs)


def check_driver(driver: tuple[int, int] | None, *, torch_cuda: tuple[int, int] | None) -> Finding:
    name = "driver"
    if driver is None:
        return fail(name, "no NVIDIA driver answers", 'install one, give the container its GPUs, or set device = "cpu"')
    text = f"runs CUDA {_dotted(driver)}"
    if torch_cuda is None:
        return warn(name, f"{text}; torch is not installed, or built for a CPU", install_extras("trainer", "rollout"))
    text += f", torch is built for {_dotted(torch_cuda)}"
    if driver[0] < torch_cuda[0]:
        return fail(name, text, f"install a driver for CUDA {torch_cuda[0]} or later")
    if driver < torch_cuda:
        return warn(name, text, f"a driver for CUDA {_dotted(torch_cuda)} avoids compilation at start")
    return ok(name, text)


def check_compilers(nvcc: str | None, cc: str | None) -> Finding:
    name = "compilers"
    if cc is None:
        return fail(name, "no C compiler", "install gcc: Triton compiles its launchers with it")
    if nvcc is None:
        return warn(name, f"{cc}, no nvcc", "install CUDA's nvcc where SGLang's kernels for this card are not built in")
    return ok(name, f"{cc}, {nvcc}")


def check_strangers(gpus: Sequence[Gpu], *, node_runs: bool) -> Finding:
    name = "free GPU memory"
    if node_runs:
        return ok(name, "the node itself is running")
    text = ", ".join(
        f"GPU {number} {gpu.free_bytes / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB" for number, gpu in enumerate(gpus)
    )
    pids = [
        f"pid {pid} ({size / 1e9:.1f} GB on GPU {number})"
        for number, gpu in enumerate(gpus)
        for pid, size in gpu.processes.items()
    ]
    if pids:
        advice = "end these processes, or plan with less memory; pids are those of the host"
        return warn(name, f"{text}; {', '.join(pids[:4])}", advice)
    if any(gpu.total_bytes - gpu.free_bytes > _STRANGER_BYTES for gpu in gpus):
        return warn(name, f"{text}; held by processes not visible from here", "run nvidia-smi on the host")
    return ok(name, text)


def torch_cuda_version() -> tuple[int, int] | None:
    """CUDA version of the installed torch, read from its files because importing it takes seconds."""
    torch = find_spec("torch")
    if torch is None or torch.submodule_search_locations is None:
        return None
    text = (Path(torch.submodule_search_locations[0]) / "version.py").read_text()
    found = re.search(r"^cuda\b.*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return None if found is None else (int(found[1]), int(found[2]))


def read_gpu_facts() -> GpuFacts:
    """Reads the facts from NVML."""
    try:
        import pynvml
    except ImportError:
        return GpuFacts(None)
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return GpuFacts(None)
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        gpus = [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
        return GpuFacts((cuda // 1000, cuda % 1000 // 10), gpus)
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not available on a MIG slice
        listed = []
    processes = {one.pid: one.usedGpuMemory or 0 for one in listed}
    return Gpu(memory.total, memory.free, processes)


def _dotted(cuda: tuple[int, int]) -> str:
    return f"{cuda[0]}.{cuda[1]}"
