"""`tasuki doctor`: each fault of the machine is found: limits, kernel, versions, clock, disk, /dev/shm, ports."""

from __future__ import annotations

import errno
import os
import pwd
import resource
import socket
from pathlib import Path

import pytest

from tasuki.doctor import host
from tasuki.doctor.finding import Verdict
from tasuki.wire.extras import install_extras
from tests.tiny_disk import tmpfs
from tests.unit.doctor import examined, is_bad, is_ok

GB = 10**9


@pytest.mark.parametrize(
    ("limit", "value", "name"),
    [
        ("RLIMIT_NOFILE", 512, "open files"),
        ("RLIMIT_MEMLOCK", 0, "locked memory"),
        ("RLIMIT_FSIZE", 1 << 20, "memory between processes, cpu"),
    ],
)
def test_a_limit_of_the_process_is_found(limit: str, value: int, name: str):
    code, findings = examined(limits=f"resource.setrlimit(resource.{limit}, ({value}, {value}))")
    assert findings[name]["verdict"] == "fail" and findings[name]["advice"]
    assert code == 1


def test_faults_of_the_machine_are_found(tmp_path: Path):
    assert is_bad(host.check_python((3, 10)), Verdict.FAIL, found="3.10", advice="3.11")
    assert is_bad(host.check_user(lambda: pwd.getpwuid(2**31 - 5)[0]), Verdict.FAIL, found="has no name", advice="export USER")
    for paths in ({"path": tmp_path / "no.so"}, {"preloaded": tmp_path / "no.so"}):
        assert is_bad(host.check_native_library(**paths), Verdict.FAIL, found="no.so is missing", advice="make native")
    (tmp_path / "scope").write_text("2\n")
    assert is_bad(host.check_yama(tmp_path / "scope"), Verdict.WARN, found="ptrace_scope 2", advice="stacks")
    assert is_ok(host.check_yama(tmp_path / "none"))
    assert is_bad(host.check_processes(tmp_path), Verdict.FAIL, found="hides other processes", advice="hidepid")
    assert is_bad(host.check_clock(0.0), Verdict.FAIL, found="1970", advice="set the clock")
    assert is_bad(host.check_open_files(4096), Verdict.WARN, found="4096", advice="65536")
    assert is_ok(host.check_open_files(resource.RLIM_INFINITY))


def test_other_versions_than_the_locks_are_found(tmp_path: Path):
    lock = tmp_path / "uv.lock"
    lock.write_text('[[package]]\nname = "torch"\nversion = "2.11.0"\n[[package]]\nname = "sglang"\nversion = "0.5.15.post1"\n')
    locked = host.locked_versions(lock)
    assert is_ok(host.check_versions({"torch": "2.11.0+cu130", "sglang": "0.5.15.post1"}, locked))
    found = host.check_versions({"torch": "2.12.0", "sglang": "0.5.15.post1"}, locked)
    assert is_bad(found, Verdict.WARN, found="torch 2.12.0 (lock: 2.11.0)", advice="make setup")
    assert is_bad(
        host.check_versions({"torch": "2.11.0"}, locked),
        Verdict.WARN,
        found="sglang not",
        advice=install_extras("trainer", "rollout"),
    )
    assert host.locked_versions(tmp_path / "none") == {}


def test_small_shared_memory_is_found(tmp_path: Path):
    with tmpfs(tmp_path / "shm", num_kib=1024) as disk:
        found = host.check_shared_memory(disk.folder)
        assert is_bad(found, Verdict.FAIL, found="MiB free", advice="--shm-size")
    with tmpfs(tmp_path / "shm64", num_kib=64 * 1024) as disk:
        assert is_ok(host.check_shared_memory(disk.folder))
        assert is_bad(host.check_shared_memory(disk.folder, num_ranks=2), Verdict.WARN, found="MiB free", advice="NCCL")
    assert host.check_shared_memory(tmp_path / "none").verdict is Verdict.FAIL


def test_a_disk_without_room_is_found(tmp_path: Path):
    with tmpfs(tmp_path / "disk", num_kib=1024) as disk:
        found = host.check_disk("state_dir", disk.folder / "new" / "node", needed_bytes=0)
        assert is_bad(found, Verdict.FAIL, found=f"at {disk.folder}", advice="choose another state_dir")
    found = host.check_disk("train.output_dir", tmp_path, needed_bytes=10**18)
    assert is_bad(found, Verdict.WARN, found="1000000000.0 GB wanted", advice="free space")


def test_a_port_that_is_taken_is_found(node_file: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert host.check_port("metrics.listen", "127.0.0.1", port).verdict is Verdict.FAIL
        code, findings = examined(node_file, "--set", f"metrics.listen=127.0.0.1:{port}")
        assert code == 1 and findings["port of metrics.listen"]["verdict"] == "fail"
    assert is_ok(host.check_port("metrics.listen", "127.0.0.1", port))


def test_little_locked_memory_matters_on_gpus_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "_may_lock", lambda: False)
    assert host.check_locked_memory(8 << 20, has_gpus=True).verdict is Verdict.WARN
    assert host.check_locked_memory(8 << 20, has_gpus=False).verdict is Verdict.OK
    assert host.check_locked_memory(0, has_gpus=False).verdict is Verdict.FAIL


@pytest.mark.parametrize("call", ["pidfd_open", "memfd_create"])
def test_a_namespace_that_forbids_what_a_node_calls_is_found(call: str, monkeypatch: pytest.MonkeyPatch):
    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as under a seccomp profile

    monkeypatch.setattr(os, call, forbidden)
    found = host.check_processes(Path("/proc"))
    assert is_bad(found, Verdict.FAIL, found="Operation not permitted", advice="seccomp profile that allows both")


def test_a_disk_that_cannot_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    found = host.check_disk("state_dir", tmp_path / "node", needed_bytes=0)
    assert is_bad(found, Verdict.FAIL, found=f"{tmp_path} cannot be written", advice="choose another state_dir")
    assert is_bad(host.check_shared_memory(tmp_path), Verdict.FAIL, found="free", advice="--shm-size")
