"""`tasuki doctor`: each fault of a node's memory is found: its plan, its copy of the model, memory shared by processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tasuki.cli.doctor import examine
from tasuki.config.load import load_config
from tasuki.config.places import model_copy_dir
from tasuki.doctor import memory
from tasuki.doctor.finding import Verdict
from tasuki.doctor.gpus import Gpu
from tasuki.doctor.memory import check_model_copy, check_passing, check_plan
from tasuki.memory.host import HostMemory, host_memory
from tasuki.supervisor.model_copy import remove_model_copy
from tests.conftest import ENVIRONMENT
from tests.tiny_disk import tmpfs
from tests.unit.doctor import finding_of, is_bad


def test_memory_of_a_gpu_that_does_not_pass_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as in a container without its GPUs
    finding = check_passing("cuda:0")
    assert finding.name == "memory between processes, cuda:0"
    assert is_bad(finding, Verdict.FAIL, found="", advice="the same GPUs, or set trainer.export_handles")
    assert "CUDA" in finding.found or "NVIDIA" in finding.found


def test_a_plan_that_does_not_fit_the_gpus_is_found(node_file: Path):
    node = load_config(node_file, overrides=['device="cuda"'])
    found = check_plan(node, [Gpu("tiny", 1 << 20, 1 << 20, {})])
    assert is_bad(found, Verdict.FAIL, found="", advice="tasuki plan")
    sized = load_config(node_file, overrides=['device="cuda"', "rollout.kv_tokens=4096"])
    assert is_bad(check_plan(sized, []), Verdict.WARN, found="no GPU", advice="--gpu-gb")


EXPORT_FAILS = """
def refused(*_):
    raise InternalError("cuMemExportToShareableHandle: operation not supported")
Arena.export = refused
"""
NO_CHUNK = """
export = Arena.export
def of_no_chunk(arena, access):
    made = export(arena, access)
    nowhere = os.open("/dev/null", os.O_RDWR)
    made.chunks = [replace(chunk, fd=nowhere) for chunk in made.chunks]
    return made
Arena.export = of_no_chunk
"""
NO_DESCRIPTOR = """
run = subprocess.run
probe.subprocess.run = lambda *argv, pass_fds, **options: run(*argv, **options)
"""
OTHER_BYTES = "probe._as_bytes = lambda device: bytes(len(probe._PATTERN))"
READER_KILLED = """
run = subprocess.run
probe.subprocess.run = lambda argv, **options: run(["sh", "-c", "kill -9 $$"], **options)
"""


def failing_probe(fault: str) -> list[str]:
    """Runs the probe with `fault`, Python code for the writing process."""
    imports = "import os, subprocess, sys\nfrom dataclasses import replace\nfrom tasuki.memory import probe\n"
    imports += "from tasuki.memory.arena import Arena\nfrom tasuki.wire.errors import InternalError\n"
    return [sys.executable, "-c", f"{imports}{fault}\nsys.exit(probe.main(sys.argv[1:]))"]


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (EXPORT_FAILS, "cuMemExportToShareableHandle: operation not supported"),
        (NO_CHUNK, "chunk at offset 0: not a sealed memfd"),
        (NO_DESCRIPTOR, "chunk at offset 0: not an open file descriptor"),
        (OTHER_BYTES, "another process reads other bytes than were written"),
        (READER_KILLED, "the reading process ended with -9"),
    ],
)
def test_memory_that_does_not_pass_between_processes_is_found(fault: str, found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    finding = check_passing("cpu", probe=failing_probe(fault))
    assert is_bad(finding, Verdict.FAIL, found=found, advice="allow memfd_create and descriptors over sockets")


def test_a_probe_that_cannot_run_is_found(tmp_path: Path):
    finding = check_passing("cpu", probe=[str(tmp_path / "python")])
    assert is_bad(finding, Verdict.FAIL, found="No such file", advice="python -m tasuki.memory.probe cpu")


def test_shared_memory_without_room_for_the_copy_of_the_model_is_found(node_file: Path, tmp_path: Path):
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.truncate(2 << 20)
    node = load_config(node_file, overrides=["model.preload=true"])
    with tmpfs(tmp_path / "full", num_kib=1024) as disk:
        finding = check_model_copy(node, folder=disk.folder)
        assert is_bad(finding, Verdict.FAIL, found="takes 2.1 MB", advice="remove model.preload")
        assert f"{disk.folder} has room for 1.0 MB" in finding.found
        model_copy_dir(node.state_dir).mkdir(mode=0o700)
        try:  # left by a node that was killed
            (model_copy_dir(node.state_dir) / "model.safetensors").write_bytes(bytes(2 << 20))
            assert check_model_copy(node, folder=disk.folder).verdict is Verdict.WARN
        finally:
            remove_model_copy(node.state_dir)
    with tmpfs(tmp_path / "small", num_kib=16 << 10) as disk:
        finding = check_model_copy(node, folder=disk.folder)
        assert is_bad(finding, Verdict.WARN, found="has room for 16.8 MB", advice="leave 1 GiB or more")
    finding = check_model_copy(node, folder=tmp_path / "none")
    assert is_bad(finding, Verdict.FAIL, found="none is missing", advice="mount a tmpfs")


def test_the_copy_of_the_model_is_checked_where_the_configuration_asks_for_it(node_file: Path, tmp_path: Path):
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 43)  # sparse
    finding = finding_of(node_file, "copy of the model", ["model.preload=true"])
    assert is_bad(finding, Verdict.FAIL, found="takes 8,796,093.0 MB, /dev/shm has room for", advice="remove model.preload")
    assert all(finding.name != "copy of the model" for finding in examine(node_file))


def test_a_host_without_free_memory_is_found(node_file: Path, monkeypatch: pytest.MonkeyPatch):
    total = host_memory().total_bytes
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(total, 1 << 20))
    finding = check_plan(load_config(node_file), [])
    assert is_bad(finding, Verdict.WARN, found="0.0 GB are free now", advice="end other programs")
