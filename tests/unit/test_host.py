"""Memory and cores within control groups, in the layouts of containers, Slurm, Kubernetes and systemd; files below a folder."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tasuki.memory.device_usage import device_usage
from tasuki.memory.host import HostMemory, host_cores, host_memory, num_memory_kills

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 23 0:33 {top} /sys/fs/cgroup/{name} rw shared:9 - cgroup cgroup rw,{name}"
FREE = str((1 << 63) - 4096)


def machine(root: Path, files: Mapping[str, str], *, groups: str, mounts: str) -> Path:
    """A machine of 64 GiB, 60 of them free. files: below /sys/fs/cgroup."""
    everything = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 5 kB\nMemAvailable: {60 << 20} kB\nCached: 1 kB\n",
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": f"23 1 8:1 / / rw - ext4 /dev/vda rw\n{mounts}\n",
        "proc/vmstat": "pgfault 3\noom_kill 7\n",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


STAT = f"anon 1\nfile {3 * GIB}\nactive_file {GIB}\ninactive_file {GIB // 2}\nslab_reclaimable {GIB // 2}\n"
V1_STAT = f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\nhierarchical_memory_limit {{limit}}\n"


def used(folder: str, maximum: object, current: int, **others: object) -> dict[str, str]:
    """Files of a v2 group in which 2 GiB can be reclaimed."""
    names = {"memory.max": maximum, "memory.current": current, "memory.stat": STAT, "memory.events": "oom 1\noom_kill 2\n"}
    return {f"{folder}{name}": f"{value}\n" for name, value in {**names, **others}.items()}


@pytest.mark.parametrize(
    ("files", "groups", "mounts", "expected"),
    [
        pytest.param({}, "0::/\n", V2, (64, 60, None), id="no limit"),
        pytest.param(used("", 8 * GIB, 5 * GIB), "0::/\n", V2.replace("2 cgroup2", "2 "), (8, 5, "memory.max"), id="no source"),
        pytest.param(used("", 8 * GIB, 5 * GIB), "0::/\n", V2, (8, 5, "memory.max"), id="docker, v2"),
        pytest.param(used("", "max", 5 * GIB), "0::/\n", V2, (64, 60, None), id="max"),
        pytest.param(
            used("", "max", 5 * GIB, **{"memory.high": 6 * GIB}), "0::/\n", V2, (6, 3, "memory.high"), id="systemd MemoryHigh"
        ),
        pytest.param(
            used("kubepods/pod1/", 9 * GIB, 9 * GIB) | used("kubepods/pod1/one/", 10 * GIB, 4 * GIB),
            "0::/kubepods/pod1/one\n",
            V2,
            (9, 2, "kubepods/pod1/memory.max"),
            id="a Kubernetes pod below its container's limit, with another container in it",
        ),
        pytest.param(
            used("system.slice/slurmd/job_7/", 16 * GIB, 3 * GIB)
            | used("system.slice/slurmd/job_7/step_0/user/task_0/", "max", GIB),
            "0::/system.slice/slurmd/job_7/step_0/user/task_0\n",
            V2,
            (16, 15, "system.slice/slurmd/job_7/memory.max"),
            id="Slurm, v2",
        ),
        pytest.param(
            {
                "memory/slurm/uid_0/job_7/memory.limit_in_bytes": str(4 * GIB),
                "memory/slurm/uid_0/job_7/memory.usage_in_bytes": str(3 * GIB),
                "memory/slurm/uid_0/job_7/memory.stat": V1_STAT.format(limit=4 * GIB),
                "memory/slurm/uid_0/job_7/step_0/memory.limit_in_bytes": FREE,
                "memory/memory.limit_in_bytes": FREE,
            },
            "4:cpu,memory:/slurm/uid_0/job_7/step_0\n1:name=systemd:/\n0::/\n",
            V1.format(top="/", name="memory") + "\n" + V2.replace("cgroup rw", "cgroup/unified rw"),
            (4, 3, "memory/slurm/uid_0/job_7/memory.limit_in_bytes"),
            id="Slurm, v1 beside v2",
        ),
        pytest.param(
            {
                "memory/job/memory.limit_in_bytes": str(4 * GIB),
                "memory/job/memory.stat": V1_STAT.format(limit=4 * GIB),
                "memory/job/step/memory.limit_in_bytes": FREE,
                "memory/job/step/memory.stat": V1_STAT.format(limit=4 * GIB),
            },
            "4:memory:/job/step\n",
            V1.format(top="/", name="memory"),
            (4, 4, "memory/job/memory.limit_in_bytes"),
            id="v1, the limit of a group above is told below it, too",
        ),
        pytest.param(
            {
                "memory/memory.limit_in_bytes": str(4 * GIB),
                "memory/memory.usage_in_bytes": str(3 * GIB),
                "memory/memory.stat": V1_STAT.format(limit=2 * GIB),
            },
            "4:memory:/docker/a\\b\n",
            V1.format(top=r"/docker/a\134b", name="memory"),
            (2, 1, "memory/memory.stat"),
            id="docker, v1, in a pod that it cannot see",
        ),
        pytest.param(
            used("", 8 * GIB, 5 * GIB), "0::/../../other\n", V2, (8, 5, "memory.max"), id="moved out of its namespace"
        ),
        *(
            pytest.param(
                used("pods/one/", 9 * GIB, 4 * GIB)
                | used("pods/", 20 * GIB, 8 * GIB)
                | used("pods/one/app/", "max", GIB, **{"cgroup.procs": f"1\n{os.getpid()}\n"})
                | used("pods/two/app/", 2 * GIB, GIB, **{"cgroup.procs": f"1{os.getpid()}\n"}),
                f"0::{path}\n",
                V2.replace(" / ", f" {top} "),
                (9, 7, "pods/one/memory.max"),
                id=f"{path} in a mount of a namespace above, at {top}",
            )
            for path, top in (("/", "/../../.."), ("/app", "/../.."), ("/../app", "/../../.."), ("/../one/app", "/../.."))
        ),
        pytest.param(
            used("", 8 * GIB, 5 * GIB), "0::/\n", V2.replace(" / ", " /../.. "), (8, 5, "memory.max"), id="a group that hides"
        ),
        pytest.param(used("", 8 * GIB, 9 * GIB), "0::/\n", V2, (8, 1, "memory.max"), id="mostly cache"),
        pytest.param(used("", 1 << 50, 5 * GIB), "0::/\n", V2, (64, 60, None), id="more than the machine has"),
    ],
)
def test_the_smallest_limit_of_the_groups_counts(
    tmp_path: Path, files: dict[str, str], groups: str, mounts: str, expected: tuple[int, int, str | None]
):
    root = machine(tmp_path, files, groups=groups, mounts=mounts)
    total, available, limited_by = expected
    file = None if limited_by is None else root / "sys/fs/cgroup" / limited_by
    assert host_memory(root) == HostMemory(total * GIB, available * GIB, file)
    if file is not None:
        assert f"{file} allows" in host_memory(root).describe()


def test_a_machine_without_groups_has_what_it_says(tmp_path: Path):
    root = machine(tmp_path, {}, groups="", mounts="")
    (root / "proc/self/cgroup").unlink()
    assert host_memory(root) == HostMemory(64 * GIB, 60 * GIB)
    assert (host_cores(root), num_memory_kills(root)) == (len(os.sched_getaffinity(0)), 7)


def test_lines_that_no_kernel_writes_are_passed_over_and_a_process_has_limits_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = used("", 8 * GIB, 5 * GIB, **{"memory.stat": f"odd\n{STAT}\xff 1 2\n"})
    root = machine(tmp_path, files, groups="odd\n1:\n0::/\n", mounts=f"odd\n31 - cgroup2\n{V2}")
    (root / "proc/meminfo").write_text(f"odd\nMemTotal: many\nMemTotal:  {64 << 20} kB\n")
    memory = host_memory(root)
    assert (memory.total_bytes, memory.available_bytes) == (8 * GIB, 5 * GIB)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: ({resource.RLIMIT_AS: GIB}.get(kind, -1), -1))
    assert host_memory(root) == HostMemory(GIB, GIB, Path("ulimit -v"))
    (root / "proc/meminfo").write_text("")
    assert host_memory(root).total_bytes == GIB


def test_shares_of_the_cores_count_and_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    inner = {"pod/one/cpu.max": "max 100000\n", "pod/cpu.max": "450000 100000\n"}
    assert host_cores(machine(tmp_path / "v2", inner, groups="0::/pod/one\n", mounts=V2)) == 4
    quota = {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}
    mounts = V1.format(top="/docker/1", name="cpu")
    assert host_cores(machine(tmp_path / "v1", quota, groups="5:cpu,cpuacct:/docker/1\n", mounts=mounts)) == 1
    free = {**quota, "cpu/cpu.cfs_quota_us": "-1\n"}
    assert host_cores(machine(tmp_path / "free", free, groups="5:cpu,cpuacct:/docker/1\n", mounts=mounts)) == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert host_cores(machine(tmp_path / "few", inner, groups="0::/pod/one\n", mounts=V2)) == 2


def test_kills_for_memory_are_those_of_the_own_group(tmp_path: Path):
    files = used("pod/", GIB, GIB, **{"memory.events": "oom_kill 9\n"}) | used("pod/one/", "max", GIB)
    assert num_memory_kills(machine(tmp_path / "v2", files, groups="0::/pod/one\n", mounts=V2)) == 2
    old = {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}
    assert num_memory_kills(machine(tmp_path / "v1", old, groups="4:memory:/\n", mounts=V1.format(top="/", name="memory"))) == 3
    both = V2.replace("cgroup rw", "cgroup/unified rw") + "\n" + V1.format(top="/", name="memory")
    assert num_memory_kills(machine(tmp_path / "hybrid", old, groups="4:memory:/\n0::/\n", mounts=both)) == 3


def test_a_rank_reports_the_host_as_the_system_sees_it() -> None:
    usage, memory = device_usage("cpu", 3), psutil.virtual_memory()
    assert (usage.device, usage.rank, usage.total_bytes, usage.torch_cached_bytes) == ("cpu", 3, memory.total, 0)
    assert abs(usage.free_bytes - memory.available) < GIB // 2
    assert abs(usage.process_bytes - psutil.Process(os.getpid()).memory_info().rss) < GIB // 16
    assert usage.other_processes_bytes == usage.total_bytes - usage.free_bytes - usage.process_bytes
