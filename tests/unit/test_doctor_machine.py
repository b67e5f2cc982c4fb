"""`tasuki doctor`: each fault of the machine is found: limits, disk, ports, GPUs, memory between processes."""

import errno
import os
import pwd
import resource
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasuki.config.load import load_config
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.doctor import host
from tasuki.doctor import node as doctor_node
from tasuki.doctor.finding import Verdict
from tasuki.doctor.host import Gpu, GpuFacts, check_compilers, check_driver, check_strangers, gpu_findings, read_gpu_facts
from tasuki.doctor.node import check_passing, check_plan, node_findings
from tasuki.memory.host import HostMemory, host_memory
from tests.conftest import ENVIRONMENT
from tests.tiny_disk import tmpfs
from tests.unit.doctor import examined, is_bad, is_ok

GB = 10**9


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


def test_faults_of_the_machine_are_found(tmp_path: Path):
    assert is_bad(host.check_user(lambda: pwd.getpwuid(2**31 - 5)[0]), Verdict.FAIL, found="has no name", advice="USER")
    missing = host.check_native_library(tmp_path / "no.so")
    assert is_bad(missing, Verdict.FAIL, found="no.so is missing", advice="make native")
    assert is_bad(host.check_processes(tmp_path), Verdict.FAIL, found="hides other processes", advice="hidepid")
    assert is_bad(host.check_open_files(512), Verdict.FAIL, found="512", advice="65536")
    assert is_bad(host.check_open_files(4096), Verdict.WARN, found="4096", advice="65536")
    assert is_ok(host.check_open_files(resource.RLIM_INFINITY))


def test_small_shared_memory_is_found(tmp_path: Path):
    with tmpfs(tmp_path / "shm", num_kib=1024) as disk:
        assert is_bad(host.check_shared_memory(disk.folder), Verdict.FAIL, found="MiB free", advice="--shm-size")
    with tmpfs(tmp_path / "shm64", num_kib=64 * 1024) as disk:
        assert is_ok(host.check_shared_memory(disk.folder))
        assert is_bad(host.check_shared_memory(disk.folder, num_ranks=2), Verdict.WARN, found="MiB free", advice="NCCL")
    assert host.check_shared_memory(tmp_path / "none").verdict is Verdict.FAIL


def test_a_disk_without_room_is_found(tmp_path: Path):
    with tmpfs(tmp_path / "disk", num_kib=1024) as disk:
        found = host.check_disk("state_dir", disk.folder / "new" / "node", needed_bytes=0)
        assert is_bad(found, Verdict.FAIL, found=f"at {disk.folder}", advice="choose another state_dir")
    found = host.check_disk("train.output_dir", tmp_path, needed_bytes=10**18, what="5 checkpoints")
    assert is_bad(found, Verdict.WARN, found="5 checkpoints take 1000000000.0 GB", advice="free space")


def test_a_port_that_is_taken_is_found(node_file: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, findings = examined(capsys, node_file, [f"metrics.listen=127.0.0.1:{port}"])
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
    assert is_bad(host.check_processes(Path("/proc")), Verdict.FAIL, found="not permitted", advice="seccomp")


def test_a_disk_that_cannot_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)  # root may write everywhere
    found = host.check_disk("state_dir", tmp_path / "node", needed_bytes=0)
    assert is_bad(found, Verdict.FAIL, found=f"{tmp_path} cannot be written", advice="choose another state_dir")
    assert is_bad(host.check_shared_memory(tmp_path), Verdict.FAIL, found="free", advice="--shm-size")


def test_missing_compilers_are_found():
    assert is_bad(check_compilers(None, None), Verdict.FAIL, found="no C compiler", advice="gcc")
    assert is_bad(check_compilers(None, "/usr/bin/cc"), Verdict.WARN, found="no nvcc", advice="nvcc")
    assert is_ok(check_compilers("/usr/local/cuda/bin/nvcc", "/usr/bin/cc"))


def test_faults_of_gpus_are_found():
    assert is_bad(check_driver(None, torch_cuda=(13, 0)), Verdict.FAIL, found="no NVIDIA driver", advice='device = "cpu"')
    assert is_bad(check_driver((12, 8), torch_cuda=(13, 0)), Verdict.FAIL, found="CUDA 12.8", advice="CUDA 13")
    assert is_bad(check_driver((13, 0), torch_cuda=(13, 1)), Verdict.WARN, found="13.0", advice="13.1")
    assert is_bad(check_driver((13, 0), torch_cuda=None), Verdict.WARN, found="torch", advice="trainer")
    assert is_ok(check_driver((13, 1), torch_cuda=(13, 0)))
    free, held = Gpu(80 * GB, 79 * GB + GB // 2, {}), Gpu(80 * GB, 20 * GB, {4711: 60 * GB})
    found = check_strangers([free, held], node_runs=False)
    assert is_bad(found, Verdict.WARN, found="pid 4711 (60.0 GB on GPU 1)", advice="end these")
    hidden = check_strangers([Gpu(80 * GB, 20 * GB, {})], node_runs=False)
    assert is_bad(hidden, Verdict.WARN, found="not visible", advice="on the host")
    assert is_ok(check_strangers([held], node_runs=True)) and is_ok(check_strangers([free], node_runs=False))
    assert [finding.name for finding in gpu_findings(GpuFacts(None), torch_cuda=None, node_runs=False)] == ["driver"]


def test_facts_of_gpus_are_nvmls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", Library(is_missing=False))
    assert read_gpu_facts() == GpuFacts((13, 1), [Gpu(100, 90, {7: 0, 8: 3}), Gpu(100, 89, {})])
    monkeypatch.setitem(sys.modules, "pynvml", Library(is_missing=True))
    assert read_gpu_facts() == GpuFacts(None)


NO_CHUNK = """
class OfNoChunk(probe.Export):
    def __init__(self, arena):
        super().__init__(arena)
        nowhere = os.open("/dev/null", os.O_RDWR)
        self.chunks = [chunk._replace(fd=nowhere) for chunk in self.chunks]
probe.Export = OfNoChunk
"""
OTHER_BYTES = "probe._PATTERN = bytes(len(probe._PATTERN))"
READER_KILLED = """
run = subprocess.run
probe.subprocess.run = lambda argv, **options: run(["sh", "-c", "kill -9 $$"], **options)
"""


@pytest.mark.parametrize(
    ("fault", "found"), [(NO_CHUNK, "not a sealed memfd"), (OTHER_BYTES, "reads other bytes"), (READER_KILLED, "ended with -9")]
)
def test_memory_that_does_not_pass_between_processes_is_found(fault: str, found: str, monkeypatch: pytest.MonkeyPatch):
    """fault: Python code for the writing process."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    imports = "import os, subprocess, sys\nfrom tasuki.memory import probe\n"
    program = [sys.executable, "-c", f"{imports}{fault}\nsys.exit(probe.main(sys.argv[1:]))"]
    assert is_bad(check_passing("cpu", probe=program), Verdict.FAIL, found=found, advice="allow memfd_create")


def test_a_probe_that_cannot_run_is_found(tmp_path: Path):
    finding = check_passing("cpu", probe=[str(tmp_path / "python")])
    assert is_bad(finding, Verdict.FAIL, found="No such file", advice="python -m tasuki.memory.probe cpu")


def test_a_plan_that_does_not_fit_is_found(node_file: Path):
    node, total = load_config(node_file, overrides=['device="cuda"']), host_memory().total_bytes
    tiny = [Gpu(1 << 20, 1 << 20, {})]
    assert is_bad(check_plan(node, tiny, free_bytes=total), Verdict.FAIL, found="", advice="tasuki plan")
    assert is_bad(check_plan(node, [], free_bytes=total), Verdict.WARN, found="no GPU", advice="--gpu-gb")
    finding = check_plan(load_config(node_file), [], free_bytes=1 << 20)
    assert is_bad(finding, Verdict.WARN, found="0.0 GB are free now", advice="end other programs")


def test_a_node_that_runs_is_not_warned_of_the_memory_that_it_holds(node_file: Path, monkeypatch: pytest.MonkeyPatch):
    config, host = load_config(node_file), HostMemory(host_memory().total_bytes, 1 << 20)
    monkeypatch.setattr(doctor_node, "host_memory", lambda: host)
    config.state_dir.mkdir(parents=True, exist_ok=True)

    def verdicts() -> list[Verdict]:
        found = node_findings(config, [], config_dir=node_file.parent, lacking={})
        return [one.verdict for one in found if one.name == "memory plan"]

    assert verdicts() == [Verdict.WARN]
    with StateLock.take(config.state_dir, name=NODE_LOCK):
        assert verdicts() == [Verdict.OK]
