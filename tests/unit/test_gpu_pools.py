"""GPU pools, as far as they can be tested without a GPU: processes that preload the library, and an allocation that fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasuki.config.gpus import gpu_processes
from tasuki.config.load import load_config
from tasuki.config.places import config_path, pool_socket_path
from tasuki.config.schema import NodeConfig
from tasuki.memory.library import PRELOADED_PATH, check_preloadable, redirect_cudart
from tasuki.memory.pool import GPU_CHUNK_BYTES
from tasuki.memory.stages import Phase
from tasuki.planner.layout import GB, Part
from tasuki.planner.node_plan import node_layout
from tasuki.planner.plan import Plan, plan
from tasuki.planner.presets import MODELS
from tasuki.supervisor.make_gpu_pools import gpu_pool_bytes, used_gpus
from tasuki.supervisor.pool import NodePool, _received
from tasuki.supervisor.services import node_services
from tasuki.transport.fd_socket import send_all
from tasuki.wire.errors import InternalError, OutOfGpuMemory, TasukiError
from tests.nvml import Library


def node(folder: Path, *overrides: str) -> NodeConfig:
    path = folder / "given.toml"
    path.write_text(f'state_dir = "{folder}/node"\ndevice = "cuda"\n[model]\npath = "{folder}"\n[memory]\npool = true\n')
    config = load_config(path, overrides=overrides)
    config_path(config.state_dir).parent.mkdir(parents=True)
    config_path(config.state_dir).write_text(path.read_text())
    pool_socket_path(config.state_dir).parent.mkdir(parents=True, exist_ok=True)
    return config


@pytest.mark.parametrize(
    ("preloaded", "expected"), [("", str(PRELOADED_PATH)), ("/a.so:/b.so", f"{PRELOADED_PATH}:/a.so:/b.so")]
)
def test_trainer_and_engine_on_a_gpus_pool_preload_what_redirects_torch(tmp_path: Path, preloaded: str, expected: str) -> None:
    services = {service.name: service.environment for service in node_services(node(tmp_path), preloaded=preloaded)}
    assert services["trainer"]["LD_PRELOAD"] == services["rollout"]["LD_PRELOAD"] == expected
    assert "LD_PRELOAD" not in services["coordinator"]


def test_nobody_else_preloads_it(tmp_path: Path) -> None:
    config = node(tmp_path, "memory.pool=false")
    assert not any("LD_PRELOAD" in service.environment for service in node_services(config, preloaded="/a.so"))


def test_each_gpu_of_either_service_has_a_pool(tmp_path: Path) -> None:
    devices = ["trainer.devices=['2','5']", "trainer.num_ranks=2", "rollout.devices=['5','7']", "rollout.tp_size=2"]
    assert used_gpus(node(tmp_path, *devices)) == [0, 1, 2]


def test_a_node_whose_gpu_has_no_driver_says_why_it_has_no_pool(tmp_path: Path) -> None:
    with pytest.raises(TasukiError, match="GPU 0 could not be made") as refused:
        NodePool(node(tmp_path))
    assert isinstance(refused.value, InternalError)
    assert not pool_socket_path(tmp_path / "node").exists()


def h200s(**trainer: Any) -> Plan:
    """A node of a 7B model on two GPUs of 141 GB, whose plan takes almost all of their memory."""
    given = {"state_dir": "s", "device": "cuda", "model": {"path": "m"}, "memory": {"pool": True}}
    config = NodeConfig.model_validate({**given, "trainer": {"num_ranks": 2, **trainer}, "rollout": {"kv_tokens": "most"}})
    return plan(node_layout(config, MODELS["qwen2.5-7b"], gpu_bytes=141 * GB, host_bytes=2000 * GB))


def test_a_pool_takes_all_of_an_empty_gpu_but_contexts_also_where_the_plan_fills_it() -> None:
    for planned in (h200s(), h200s(micro_batch_tokens=300_000)):
        context = GB // 2  # of the process that creates the pool
        size = gpu_pool_bytes(planned, 0, free_bytes=141 * GB - context, read_processes=no_processes)
        outside = planned.stage(Phase.TRAIN).gpus[0][Part.CONTEXTS] + planned.layout.overheads.margin
        assert 141 * GB - context - outside - GPU_CHUNK_BYTES < size <= 141 * GB - context - outside
        assert size % GPU_CHUNK_BYTES == 0


def test_a_pool_beside_another_process_is_refused_with_the_bytes_and_the_process() -> None:
    planned = h200s()
    peak = max(sum(size for part, size in stage.gpus[1].items() if part is not Part.CONTEXTS) for stage in planned.stages)
    with pytest.raises(OutOfGpuMemory, match=r"pid 4711 \(60000000000 bytes\)") as refused:
        gpu_pool_bytes(
            planned, 1, free_bytes=81 * GB, read_processes=lambda gpu: {4711: 60 * GB, os.getpid(): GB} if gpu else {}
        )
    assert str(os.getpid()) not in refused.value.message
    metadata = refused.value.metadata
    assert (metadata["device"], metadata["free_bytes"]) == ("cuda:1", str(81 * GB))
    assert peak < int(metadata["needed_bytes"]) <= 141 * GB
    with pytest.raises(OutOfGpuMemory, match="run nvidia-smi on the host"):
        gpu_pool_bytes(planned, 0, free_bytes=81 * GB, read_processes=no_processes)


def test_a_pool_that_holds_the_planned_peak_is_made_beside_another_process() -> None:
    config = NodeConfig.model_validate(
        {"state_dir": "s", "device": "cuda", "model": {"path": "m"}, "rollout": {"kv_tokens": 100_000, "context_length": 4096}}
        | {"trainer": {"num_ranks": 2, "micro_batch_tokens": 8192}, "memory": {"pool": True}}
    )
    planned = plan(node_layout(config, MODELS["qwen2.5-1.5b"], gpu_bytes=141 * GB, host_bytes=2000 * GB))
    assert gpu_pool_bytes(planned, 0, free_bytes=81 * GB, read_processes=no_processes) > 70 * GB


def test_processes_of_a_gpu_are_those_of_the_one_that_the_node_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Library(is_missing=False))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_processes(0) == {7: 0, 8: 3} and gpu_processes(1) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert gpu_processes(1) == {7: 0, 8: 3} and gpu_processes(0) == gpu_processes(2) == {}
    monkeypatch.setitem(sys.modules, "pynvml", Library(is_missing=True))
    assert gpu_processes(1) == {}


def no_processes(gpu: int) -> dict[int, int]:
    return {}


@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        (b'["GPU_MEMORY", "cuda:1 has 3 bytes free", {"free_bytes": "3"}]', OutOfGpuMemory, "^cuda:1 has 3 bytes free"),
        (b'["INVALID_ARGUMENT", "model.path: no folder", {}]', InternalError, "GPU 1 could not be made: model.path: no folder"),
        (None, InternalError, "GPU 1 could not be made: .* hung up"),
    ],
)
def test_what_the_maker_says_is_what_the_node_ends_with(message: bytes | None, error: type[TasukiError], text: str) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here:
        if message is not None:
            send_all(there, message, [])
        there.close()
        with pytest.raises(error, match=text) as refused:
            _received(here, 1)
    assert refused.value.metadata.get("free_bytes") == ("3" if error is OutOfGpuMemory else None)


def test_a_library_that_would_not_be_preloaded_is_refused(tmp_path: Path) -> None:
    check_preloadable()
    spaced = tmp_path / "a b.so"
    spaced.touch()
    for path, text in ((tmp_path / "no.so", "is missing: run `make native`"), (spaced, "install tasuki elsewhere")):
        with pytest.raises(InternalError, match=text):
            check_preloadable(path)


def test_a_process_without_the_preloaded_library_is_told_how_to_start() -> None:
    with pytest.raises(InternalError, match="tasuki up"):
        redirect_cudart(0, 1)


def test_the_preloaded_library_harms_no_other_program() -> None:
    command = [sys.executable, "-c", "import ctypes; ctypes.CDLL(None).tasuki_redirect_cudart; print('runs')"]
    run = subprocess.run(command, env={"LD_PRELOAD": str(PRELOADED_PATH)}, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("runs\n", "")
