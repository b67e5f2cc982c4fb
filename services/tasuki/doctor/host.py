"""Checks of `tasuki doctor` on every machine: user, library, versions, limits, processes, /dev/shm, disks, ports, GPUs."""

import getpass
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tasuki.config.gpus import nvml_session
from tasuki.doctor.finding import Finding, fail, ok, warn
from tasuki.memory.arena import LIBRARY_PATH, totals
from tasuki.memory.host import host_cores, host_memory
from tasuki.wire.address import bind_once
from tasuki.wire.denied_path import what_to_change
from tasuki.wire.errors import TasukiError
from tasuki.wire.extras import install_extras

_MIB, _GIB = 1 << 20, 1 << 30
_PACKAGES = ("flash-attn-4", "grpcio", "numpy", "protobuf", "pydantic", "pyzmq", "sglang", "torch", "transformers")
"""Packages that affect a node's results or start."""


def host_findings() -> Iterable[Finding]:
    yield check_user(getpass.getuser)
    yield check_native_library()
    yield check_versions()
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_gpus=Path("/dev/nvidiactl").exists())
    yield check_processes(Path("/proc"))
    yield ok("memory and cores", f"{host_cores()} cores; {host_memory().describe()}")


def check_user(name_of: Callable[[], str]) -> Finding:
    """Checks that the user has a name, from which torch makes folders when it is imported. Users of a container may have none."""
    try:
        return ok("user", name_of())
    except (KeyError, OSError):
        advice = "export USER=tasuki, or any other name: torch cannot be imported without"
        return fail("user", f"user {os.getuid()} has no name", advice)


def check_native_library(path: Path = LIBRARY_PATH) -> Finding:
    name = "native library"
    if not path.exists():
        return fail(name, f"{path} is missing", "run `make native`, or install a wheel of tasuki")
    try:
        totals()
    except TasukiError as error:
        return fail(name, error.message, "run `make native`")
    return ok(name, str(path))


def check_versions() -> Finding:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return ok("versions", ", ".join(f"{name} {number}" for name, number in found.items()))


def check_open_files(limit: int) -> Finding:
    name, text = "open files", "unlimited" if limit < 0 else str(limit)
    if 0 <= limit < 8192:
        advice = "raise the hard limit to 65536: ulimit -n, LimitNOFILE= or docker --ulimit nofile=65536"
        return (fail if limit < 1024 else warn)(name, text, advice)
    return ok(name, text)


def check_locked_memory(limit: int, *, has_gpus: bool) -> Finding:
    name, text = "locked memory", "unlimited" if limit < 0 else f"{limit // _MIB} MiB"
    advice = "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity or docker --ulimit memlock=-1"
    if 0 <= limit < _MIB:
        return fail(name, text, advice)
    if has_gpus and 0 <= limit < 64 * _MIB and os.geteuid() != 0:
        return warn(name, text, f"{advice}; NCCL needs it over InfiniBand")
    return ok(name, text)


def check_processes(proc: Path) -> Finding:
    """Checks that this process sees its user's other processes and can open pidfds on them, as the supervisor does."""
    name = "processes"
    if os.getppid() and not (proc / str(os.getppid()) / "stat").exists():
        advice = "mount it without hidepid, and run node and `tasuki train` in one namespace"
        return fail(name, f"{proc} hides other processes", advice)
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("tasuki-doctor"))
    except OSError as error:
        advice = "use Linux 5.3 or later, and a seccomp profile that allows both"
        return fail(name, f"pidfd_open or memfd_create: {error.strerror}", advice)
    return ok(name, "pidfd, memfd and /proc work")


def check_shared_memory(path: Path = Path("/dev/shm"), *, num_ranks: int = 1) -> Finding:  # noqa: S108 - only looked at
    name, advice = str(path), "docker run --shm-size 16g, or remount it larger: a node's processes and NCCL share memory there"
    if not path.is_dir():
        return fail(name, "is missing", "mount a tmpfs there")
    free = shutil.disk_usage(path).free
    text = f"{free // _MIB} MiB free"
    if free < 16 * _MIB or not os.access(path, os.W_OK):
        return fail(name, text, advice)
    return warn(name, text, advice) if num_ranks > 1 and free < _GIB else ok(name, text)


def check_disk(key: str, folder: Path, *, needed_bytes: int, what: str = "") -> Finding:
    """Checks space and permission. needed_bytes: expected size of `what` a run writes there."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.exists(each))
    name = f"disk of {key}"
    if not place.is_dir():
        return fail(name, f"{place} is not a folder", f"choose another {key}")
    if not os.access(place, os.W_OK | os.X_OK):
        return fail(name, f"{place} cannot be written", f"choose another {key}, or: {what_to_change(place)}")
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:.1f} GB free at {place}"
    if free < 200 * _MIB:
        return fail(name, text, f"free space, or choose another {key}: a node stops if it cannot write journal and logs")
    if free < needed_bytes:
        advice = "free space, or lower keep_last of the run"
        return warn(name, f"{text}, {what} take {needed_bytes / 1e9:.1f} GB", advice)
    return ok(name, f"{text}, {what} take {needed_bytes / 1e9:.1f} GB" if needed_bytes else text)


def check_port(key: str, host: str, port: int) -> Finding:
    """Checks the port of a node that is not running yet."""
    name = f"port of {key}"
    try:
        bind_once(host, port)
    except OSError as error:
        return fail(name, f"{host}:{port}: {error.strerror}", f"choose another {key}; `ss -ltnp` shows who listens there")
    return ok(name, f"{host}:{port} is free")


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
    free, pids = list[str](), list[str]()
    for number, gpu in enumerate(gpus):
        free.append(f"GPU {number} {gpu.free_bytes / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB")
        pids += [f"pid {pid} ({size / 1e9:.1f} GB on GPU {number})" for pid, size in gpu.processes.items()]
    text = ", ".join(free)
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
    with suppress(ImportError), nvml_session() as nvml:
        gpus: list[Gpu] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle, listed = nvml.nvmlDeviceGetHandleByIndex(index), []
            with suppress(nvml.NVMLError):  # not available on a MIG slice
                listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(Gpu(memory.total, memory.free, {one.pid: one.usedGpuMemory or 0 for one in listed}))
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return GpuFacts((cuda // 1000, cuda % 1000 // 10), gpus)
    return GpuFacts(None)


def _dotted(cuda: tuple[int, int]) -> str:
    return f"{cuda[0]}.{cuda[1]}"
