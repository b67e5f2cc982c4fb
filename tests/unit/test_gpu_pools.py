"""A pool of a GPU, as far as a machine without one can tell: who preloads what, and a maker that fails."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.config.load import load_config
from tasuki.config.places import config_path, pool_socket_path
from tasuki.config.schema import NodeConfig
from tasuki.memory.library import PRELOADED_PATH, check_preloadable, redirect_cudart
from tasuki.supervisor.make_gpu_pools import used_gpus
from tasuki.supervisor.pool import NodePool, _received
from tasuki.supervisor.services import node_services
from tasuki.transport.fd_socket import send_all
from tasuki.wire.errors import InternalError, OutOfGpuMemory, TasukiError


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


@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        (b"GPU_MEMORY\ncuda:1 has 3 bytes free", OutOfGpuMemory, "^cuda:1 has 3 bytes free"),
        (b"INVALID_ARGUMENT\nmodel.path: no folder", InternalError, "GPU 1 could not be made: model.path: no folder"),
        (None, InternalError, "GPU 1 could not be made: .* hung up"),
    ],
)
def test_what_the_maker_says_is_what_the_node_ends_with(message: bytes | None, error: type[TasukiError], text: str) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here:
        if message is not None:
            send_all(there, message, [])
        there.close()
        with pytest.raises(error, match=text):
            _received(here, 1)


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
