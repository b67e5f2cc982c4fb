"""A node in memory: the real coordinator and journal, over services that fail on request."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tests.extent import IS_WHOLE, examples
from tests.sparse_weights import write_sparse_weights
from tests.unit.fake_node import make_node
from tests.unit.fake_services import FakeServices
from tests.unit.memory_folder import memory_folder, write_tokenizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# No deadline: an example's time only shows how busy the machine is. `make test` repeats its examples, each `make chaos` draws others.
settings.register_profile(
    "tasuki", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples(100), derandomize=not IS_WHOLE
)
settings.load_profile("tasuki")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Returns a folder in memory: no test cuts the power, so commits need not wait for a disk."""
    with tempfile.TemporaryDirectory(prefix="tasuki-unit-", dir=memory_folder(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def node_file(tmp_path: Path) -> Path:
    """Returns the configuration of a node that would start on a CPU."""
    from tests.unit.test_plan_cli import CONFIG

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(model)
    write_sparse_weights(model)
    file = tmp_path / "node.toml"
    file.write_text(f'state_dir = "{tmp_path}/node"\n[model]\npath = "model"\n')
    return file


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_epoch("boot-1")
    yield journal
    journal.close()


@pytest.fixture
def services() -> FakeServices:
    return FakeServices()


@pytest.fixture
async def node(journal: Journal, services: FakeServices) -> Node:
    return make_node(journal, services, recovery_timeout_s=60.0)  # services come back in time on a busy machine, too


@pytest.fixture
def mesh() -> Iterator["DeviceMesh"]:
    """One rank."""
    import torch.distributed as dist  # takes seconds, so only if a test needs it
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
