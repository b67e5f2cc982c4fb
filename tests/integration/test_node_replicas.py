"""Sums over nodes by gloo: each thread is a node, and the nodes meet in the store of the fleet's port."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.trainer.launch import Launch
from tasuki.trainer.other_nodes import until_another_starts
from tasuki.trainer.replicas import NodeReplicas, join_store
from tasuki.weights.gloo_peers import check_gloo_peers
from tasuki.wire.errors import DeadlineExceeded, PeerUnavailable, TasukiError, VersionOrder
from tests.integration.fleet_port import FleetPort, fleet_port


@pytest.fixture
def port(tmp_path: Path) -> Iterator[FleetPort]:
    # as a trainer's start does for the groups of one node
    check_gloo_peers()
    with fleet_port(tmp_path / "fleet", num_nodes=3) as served:
        yield served


def config_of(port: FleetPort, folder: Path, node_rank: int, *, timeout_s: float = 10.0) -> NodeConfig:
    model = folder / f"model-{node_rank}"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"hidden_size": 8}))
    file = folder / f"node-{node_rank}.toml"
    head = (
        f'state_dir = "{folder}/state-{node_rank}"\n[model]\npath = "{model}"\n[coordinator]\nstage_timeout_s = {timeout_s}\n'
    )
    file.write_text(head + port.tables(node_rank))
    return load_config(file, overrides=[])


def connect(port: FleetPort, folder: Path, node_rank: int, **settings: Any) -> NodeReplicas:
    config = config_of(port, folder, node_rank, **settings)
    launch = Launch(rank=0, local_rank=0, num_ranks=1, launcher_fd=-1, store_path=folder / f"launch-{node_rank}" / "store")
    return NodeReplicas.connect(join_store(config, launch), config=config, launch=launch, device=torch.device("cpu"))


def on_each(port: FleetPort, folder: Path, work: Callable[[NodeReplicas, int], Any], **settings: Any) -> list[Any]:
    """Runs `work` on every node and returns the results, including errors. No node leaves before the last is done."""
    staying: list[NodeReplicas] = []

    def run(node_rank: int) -> Any:
        replicas = connect(port, folder, node_rank, **settings)
        staying.append(replicas)
        try:
            return work(replicas, node_rank)
        except TasukiError as error:
            return error

    with ThreadPoolExecutor(port.num_nodes) as pool:
        return list(pool.map(run, range(port.num_nodes)))


def test_gradients_add_up_to_the_same_bits_on_all_nodes(port: FleetPort, tmp_path: Path) -> None:
    shapes = [(3, 5), (0, 4), (7,)]
    gradients = [[torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for shape in shapes] for rank in range(3)]
    expected = [torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True)]

    def work(replicas: NodeReplicas, rank: int) -> list[torch.Tensor]:
        replicas.add_up(gradients[rank])
        return gradients[rank]

    first, *others = on_each(port, tmp_path, work)
    for got, want in zip(first, expected, strict=True):
        torch.testing.assert_close(got, want)
    assert all(torch.equal(mine, theirs) for other in others for mine, theirs in zip(first, other, strict=True))


def test_nodes_take_the_values_of_the_first(port: FleetPort, tmp_path: Path) -> None:
    values = [torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    expected = values[0].clone()
    on_each(port, tmp_path, lambda replicas, rank: replicas.share([values[rank]]))
    assert all(torch.equal(each, expected) for each in values)


def test_a_number_that_differs_is_refused_on_every_node(port: FleetPort, tmp_path: Path) -> None:
    def work(replicas: NodeReplicas, rank: int) -> float:
        replicas.check_alike({"learning_rate": 0.1, "version of the policy": 7})
        replicas.check_alike({"learning_rate": 0.1, "version of the policy": 8 if rank == 1 else 7})
        return 0.0

    errors = on_each(port, tmp_path, work)
    assert all(isinstance(error, VersionOrder) and "version of the policy is 7 to 8" in error.message for error in errors)


def test_all_nodes_take_the_greatest_norm(port: FleetPort, tmp_path: Path) -> None:
    assert on_each(port, tmp_path, lambda replicas, rank: replicas.greatest(1.0 + rank * 2**-52)) == [1.0 + 2**-51] * 3


def test_a_node_that_does_not_come_is_a_typed_error_within_the_time_out(port: FleetPort, tmp_path: Path) -> None:
    def work(replicas: NodeReplicas, rank: int) -> float:
        return 0.0 if rank == 2 else replicas.greatest(1.0)

    *others, _ = on_each(port, tmp_path, work, timeout_s=8.0)
    assert all(isinstance(error, PeerUnavailable) and "lab" in error.message for error in others)


async def test_a_trainer_hears_that_another_waits_for_it_to_start_again(port: FleetPort, tmp_path: Path) -> None:
    configs = [config_of(port, tmp_path, rank) for rank in range(3)]

    def launch(name: str) -> Launch:
        return Launch(rank=0, local_rank=0, num_ranks=1, launcher_fd=-1, store_path=tmp_path / name / "store")

    joined = [asyncio.to_thread(join_store, config, launch(f"launch-{rank}")) for rank, config in enumerate(configs)]
    store, *_ = await asyncio.gather(*joined)
    hearing = asyncio.create_task(until_another_starts(configs[0], store.name))
    await asyncio.sleep(0.5)
    assert not hearing.done()
    again = asyncio.create_task(asyncio.to_thread(join_store, configs[2], launch("again")))
    await asyncio.wait_for(hearing, 60.0)
    with pytest.raises(DeadlineExceeded, match=r"\[0, 1\]"):
        await again


def test_a_node_measures_what_it_sends_to_the_others(port: FleetPort, tmp_path: Path) -> None:
    rates = on_each(port, tmp_path, lambda replicas, rank: replicas.measure_rate())
    assert all(1e6 < rate < 1e12 for rate in rates)
