"""Fixtures for learners of one rank: its process group, its mesh, and a tiny model with a value head."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.integration.plain_critic import add_head
from tests.models import make_model, save_checkpoint


@contextmanager
def group_of_one() -> Iterator[None]:
    """A gloo group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    with group_of_one():
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(make_model("llama", seed=0), tmp_path_factory.mktemp("model") / "llama")
    add_head(folder)
    return folder
