"""One pool of a real GPU, lent to two processes in turn; memory of a killed process comes back.

Needs `make native`, a CUDA GPU and no network.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tasuki.config.load import load_config
from tasuki.config.places import config_path, pool_socket_path
from tasuki.memory.library import PRELOADED_PATH
from tasuki.memory.pool import GPU_CHUNK_BYTES
from tasuki.supervisor.pool import NodePool
from tests.conftest import ENVIRONMENT
from tests.models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CHUNK = GPU_CHUNK_BYTES
_CONTEXTS_BYTES = 2 << 30
"""Room for the contexts, kernels and page tables of two processes."""


class Peer:
    def __init__(self, socket_path: Path) -> None:
        environment = {**ENVIRONMENT, "LD_PRELOAD": str(PRELOADED_PATH)}
        command = [sys.executable, "-m", "tests.gpu.pool_peer", str(socket_path)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *words: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def polled(pool: NodePool) -> Iterator[None]:
    """Polls the pool as the supervisor does."""
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(0.02):
            pool.poll()

    thread = threading.Thread(target=poll)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def pool_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("node")
    make_model("llama", seed=0).save_pretrained(folder / "model")
    text = f'state_dir = "{folder}/node"\ndevice = "cuda"\n[model]\npath = "{folder}/model"\n[memory]\npool = true\n'
    path = folder / "node.toml"
    path.write_text(text)
    config = load_config(path)
    place = config_path(config.state_dir)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    pool_socket_path(config.state_dir).parent.mkdir(parents=True, exist_ok=True)
    pool = NodePool(config)
    with polled(pool):
        yield pool_socket_path(config.state_dir)
    pool.close()


@pytest.fixture
def peers(pool_path: Path) -> Iterator[tuple[Peer, Peer]]:
    with ExitStack() as stack:
        made = [Peer(pool_path) for _ in range(2)]
        for peer in made:
            stack.callback(peer.end)
        yield made[0], made[1]


def test_nearly_all_memory_of_the_gpu_passes_from_one_process_to_the_other(peers: tuple[Peer, Peer]) -> None:
    one, other = peers
    usage = one("usage")
    free, total = torch.cuda.mem_get_info()
    assert usage["num_chunks"] * CHUNK > 0.9 * total and free < 0.1 * total
    most = (usage["num_chunks"] - 4) * CHUNK
    one("allocate", most)
    one("write", 3)
    one("pause")
    other("allocate", most)
    other("write", 5)
    assert other("usage")["num_free"] == 4
    other("pause")
    one("resume")
    assert one("read") == [5], "memory that is lent is not cleared"
    assert torch.cuda.mem_get_info()[0] > free - _CONTEXTS_BYTES, "nothing was made"


def test_segments_of_torch_are_the_pools_and_go_back_to_it(peers: tuple[Peer, Peer]) -> None:
    one, other = peers
    before = other("usage")["num_free"]
    num_bytes = 3 * CHUNK + 5
    total, held, left = one("torch", num_bytes)
    assert total == num_bytes and held >= num_bytes and left <= CHUNK
    assert before - other("usage")["num_free"] <= 1


def test_chunks_of_a_killed_process_come_back_and_are_lent_again(peers: tuple[Peer, Peer]) -> None:
    one, other = peers
    free = other("usage")["num_free"]
    one("allocate", 4 * CHUNK)
    assert other("usage")["num_free"] <= free - 4
    one.end()
    ends_at = time.monotonic() + 20
    while other("usage")["num_free"] < free and time.monotonic() < ends_at:
        time.sleep(0.05)
    # torch also reads through memory of the pool
    other("allocate", (free - 2) * CHUNK)
    other("write", 7)
    assert other("read") == [7]
