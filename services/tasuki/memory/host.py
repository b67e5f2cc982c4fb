"""Memory and cores that this process may use: the machine's, within the control groups of a container, a Slurm job or a systemd unit."""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tasuki.config.environment import cpu_threads

_KIB = 1024
_ROOT = Path("/")
_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Of cgroups v2 and v1. Above `memory.high` the kernel kills nothing, but lets processes crawl."""
_OF_PROCESS = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}
_MOUNT = re.compile(r"^\S+ \S+ \S+ (/\S*) (/\S*) .* - (\S+) \S* (\S+)$", re.MULTILINE)
_RECLAIMABLE = {"active_file", "inactive_file", "slab_reclaimable", "total_active_file", "total_inactive_file"}
"""Lines of memory.stat that the kernel frees before it kills; those of v1 that count the groups below begin with "total_"."""
_ALLOW_MORE = (
    "raise it (docker --memory, compose mem_limit, Kubernetes resources.limits.memory, Slurm --mem, systemd MemoryMax)"
)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. `available_bytes`: what the system would give without swapping."""

    total_bytes: int
    available_bytes: int
    limited_by: Path | None = None
    """File of the control group whose limit is `total_bytes`, or "ulimit -v"; None if the machine has no more."""

    def describe(self) -> str:
        has = f"{self.total_bytes / 1e9:.1f} GB of memory"
        return f"this machine has {has}" if self.limited_by is None else f"{self.limited_by} allows {has}; {_ALLOW_MORE}"


def host_memory(root: Path = _ROOT) -> HostMemory:
    """The smallest of the machine's memory and the limits of all control groups around this process. root: holds /proc and /sys."""
    told = dict(re.findall(r"^(\w+):\s*(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE))
    has = int(told["MemTotal"]) * _KIB if "MemTotal" in told else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total, available, limited_by = has, int(told["MemAvailable"]) * _KIB if "MemAvailable" in told else has, None
    for name, kind in _OF_PROCESS.items():
        if 0 <= (limit := resource.getrlimit(kind)[0]) < total:
            total, limited_by = limit, Path(name)
    for depth, group in enumerate(_groups("memory", root)):
        limits = {group / name: limit for name in _MEMORY_LIMITS if (limit := _number(group / name)) is not None}
        if depth and all(limit >= has for limit in limits.values()):
            continue
        stat = _counts(group / "memory.stat")
        if "hierarchical_memory_limit" in stat:  # v1 tells limits of groups outside the container only here
            limits = {group / "memory.stat": stat["hierarchical_memory_limit"], **limits}
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        # Without "total_" v1 counts the group alone.
        names = {name for name in _RECLAIMABLE if ("total_inactive_file" in stat) <= name.startswith("total_")}
        used -= sum(stat.get(name, 0) for name in names)
        for file, limit in limits.items():
            if limit < has and limit <= total:  # the group that sets the limit, not one below it that repeats it
                total, limited_by = limit, file
            available = min(available, max(0, limit - max(0, used)))
    return HostMemory(total, min(available, total), limited_by)


def host_cores(root: Path = _ROOT) -> int:
    """Cores that this process may keep busy: those it may run on, and its control groups' share of time. At least 1."""
    cores = float(len(os.sched_getaffinity(0)))  # within the cpusets
    for group in _groups("cpu", root):
        quota, period = _share(group)
        if quota > 0 < period:
            cores = min(cores, quota / period)
    return max(1, int(cores))


def rank_threads() -> int:
    """Torch threads of a rank on a CPU, at most as many as cores."""
    return min(cpu_threads(), host_cores())


def num_memory_kills(root: Path = _ROOT) -> int:
    """Processes that the kernel has killed for memory: of the innermost control group that counts them, or else of the machine."""
    for group in _groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if "oom_kill" in (counts := _counts(group / name)):
                return counts["oom_kill"]
    return _counts(root / "proc/vmstat").get("oom_kill", 0)


@lru_cache
def _groups(controller: str, root: Path) -> tuple[Path, ...]:
    """Folders of the control groups around this process, v1 and v2, innermost first; as they were when first asked for."""
    return tuple(_read_groups(controller, root))


def _read_groups(controller: str, root: Path) -> Iterator[Path]:
    paths: dict[str, str] = {}
    for controllers, path in re.findall(r"^\d+:([^:]*):(/.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE):
        paths |= dict.fromkeys(controllers.split(","), path)  # v2 has none
    for *fields, kind, options in _MOUNT.findall(_text(root / "proc/self/mountinfo")):
        path = paths.get("" if kind == "cgroup2" else controller)
        if path is None or not (kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))):
            continue
        top, place = (Path(_unescaped(field)) for field in fields)
        place = root / place.relative_to("/")
        group = _group_in(place, top, Path(path))
        for folder in (group, *group.parents):
            yield folder
            if folder == place:
                break


def _group_in(place: Path, top: Path, path: Path) -> Path:
    """Folder of this process's group in a mount at `place`. top, path: of mount and group, from the root of the cgroup namespace."""
    if path.is_relative_to(top) and ".." not in path.relative_to(top).parts:
        return place / path.relative_to(top)
    # The mount may begin above the namespace, whose folders in it have no names here: it is found by its process.
    num_unnamed = top.parts.count("..") - path.parts.count("..")
    below = Path(*(part for part in path.parts[1:] if part != ".."))
    folders = (folder / below for folder in place.glob("*/" * num_unnamed)) if num_unnamed > 0 else ()
    own = str(os.getpid())
    return next((folder for folder in folders if own in _text(folder / "cgroup.procs").split()), place)


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def _share(group: Path) -> tuple[int, int]:
    """Microseconds of all cores, and in how many; not positive where nothing limits them."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota), int(period)
    return _number(group / "cpu.cfs_quota_us") or 0, _number(group / "cpu.cfs_period_us") or 0


def _number(file: Path) -> int | None:
    """None without the file, or if it says "max"."""
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def _counts(file: Path) -> dict[str, int]:
    """Lines of a name and a number; empty without the file."""
    return {name: int(number) for name, number in re.findall(r"^(\S+) (\d+)$", _text(file), re.MULTILINE)}


def _text(file: Path) -> str:
    """Empty without the file."""
    with suppress(OSError):
        return file.read_text(errors="surrogateescape")
    return ""
