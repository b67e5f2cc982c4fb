"""Trainers over nodes in the ways that take longer: adapters, a critic, three nodes from two nodes' checkpoint, two network namespaces."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasuki.v1.types_pb2 import ROLE_CRITIC, TrainingSample
from tests.integration.fleet_port import fleet_port
from tests.integration.fleet_trainers import fleet_of, nodes_of, start_node, sums_of
from tests.integration.trainer_process import VALUE, TrainerClient, TrainerProcess, connect, start_trainer
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

NUM_STEPS = 20
SETTINGS = 'learning_rate = 1e-3\neps = 1e-3\nmicro_batch_tokens = 64\ncollective_timeout_s = 20\ncompute_dtype = "float32"\n'
LORA = '[trainer.lora]\nrank = 2\nalpha = 4\ntarget_modules = ["q_proj", "v_proj"]\n'
CRITIC = "[trainer.critic]\nlearning_rate = 1e-3\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("llama", seed=3), tmp_path_factory.mktemp("model"))


def samples_of(step: int, *, seed: int | None = None) -> list[TrainingSample]:
    samples = make_samples(8, vocab_size=VOCAB_SIZE, seed=step if seed is None else seed, policy_version=step)
    for sample in samples:
        sample.returns.extend([0.5] * len(sample.completion_token_ids))
    return samples


@pytest.mark.parametrize("extra", [LORA, CRITIC], ids=["lora", "critic"])
async def test_two_nodes_of_two_ranks_learn_as_one_rank(tmp_path: Path, model: Path, extra: str) -> None:
    alone = start_trainer(tmp_path / "alone", model, num_ranks=1, settings=SETTINGS + extra)
    try:
        with nodes_of(tmp_path, model, num_nodes=2, num_ranks=2, settings=SETTINGS + extra) as nodes:
            alone.wait_until_serving()
            async with fleet_of(nodes, model, num_ranks=2) as fleet, connect(alone) as channel:
                one = TrainerClient(channel)
                for step in range(NUM_STEPS):
                    samples = samples_of(step)
                    expected, got = await one.forward_backward(samples), await fleet.forward_backward(samples)
                    assert got.loss == pytest.approx(expected.loss, abs=1e-5)
                    await one.optim_step()
                    await fleet.optim_step()
                    if extra == CRITIC:
                        values = await one.forward_backward(samples, role=ROLE_CRITIC, loss=VALUE)
                        fleets = await fleet.forward_backward(samples, role=ROLE_CRITIC, loss=VALUE)
                        assert fleets.loss == pytest.approx(values.loss, abs=1e-5)
                        await one.optim_step(role=ROLE_CRITIC)
                        await fleet.optim_step(role=ROLE_CRITIC)
                await fleet.save(lambda rank: tmp_path / f"checkpoint-{rank}")
                assert sums_of(tmp_path / "checkpoint-0") == sums_of(tmp_path / "checkpoint-1")
    finally:
        alone.stop()


async def test_three_nodes_go_on_from_the_checkpoint_of_two(tmp_path: Path, model: Path) -> None:
    alone = start_trainer(tmp_path / "alone", model, num_ranks=1, settings=SETTINGS)
    try:
        with nodes_of(tmp_path / "two", model, num_nodes=2, settings=SETTINGS) as nodes:
            async with fleet_of(nodes, model) as fleet:
                await fleet.forward_backward(samples_of(0))
                await fleet.optim_step()
                await fleet.save(lambda rank: tmp_path / f"checkpoint-{rank}")
        alone.wait_until_serving()
        with nodes_of(tmp_path / "three", model, num_nodes=3, settings=SETTINGS) as nodes:
            async with fleet_of(nodes, model) as fleet, connect(alone) as channel:
                one = TrainerClient(channel)
                await fleet.on_all(lambda client: client.load(tmp_path / "checkpoint-1"))
                await one.load(tmp_path / "checkpoint-0")
                for step in range(1, 5):
                    expected, got = await one.forward_backward(samples_of(step)), await fleet.forward_backward(samples_of(step))
                    assert got.loss == pytest.approx(expected.loss, abs=1e-5)
                    await one.optim_step()
                    assert len({answer.grad_norm for answer in await fleet.optim_step()}) == 1
    finally:
        alone.stop()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def namespace_pair() -> Iterator[tuple[str, str]]:
    """Two machines as far as the network goes: the test's own namespace and another, joined by a veth pair. Gives both interfaces."""
    name, here, there = f"tasuki{os.getpid()}", f"tv{os.getpid() % 100000}a", f"tv{os.getpid() % 100000}b"
    ip("netns", "add", name)
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("addr", "add", "10.117.0.1/24", "dev", here)
        ip("link", "set", here, "up")
        for arguments in (
            ["addr", "add", "10.117.0.2/24", "dev", there],
            ["link", "set", there, "up"],
            ["link", "set", "lo", "up"],
        ):
            ip("-n", name, *arguments)
        yield here, f"{name}:{there}"
    finally:
        ip("netns", "del", name)


def sent_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
async def test_gradients_alone_cross_the_link_between_two_namespaces(tmp_path: Path, model: Path) -> None:
    with namespace_pair() as (here, there), fleet_port(tmp_path / "port", num_nodes=2, host="10.117.0.1") as port:
        name, _, interface = there.partition(":")
        nodes: list[TrainerProcess] = []
        try:
            nodes.append(start_node(tmp_path, model, port, 0, settings=SETTINGS, interface=here))
            nodes.append(start_node(tmp_path, model, port, 1, settings=SETTINGS, interface=interface, namespace=name))
            for node in nodes:
                node.wait_until_serving()
            async with fleet_of(nodes, model) as fleet:
                num_parameters = (await fleet.clients[0].state()).num_parameters
                for step in range(3):
                    at_start = sent_bytes(here)
                    await fleet.forward_backward(samples_of(step))
                    in_between = sent_bytes(here)
                    await fleet.optim_step()
                    at_end = sent_bytes(here)
                    # Two nodes: each sends the bytes of its gradients once; frames and acknowledgements add a few percent.
                    assert 4 * num_parameters < at_end - in_between < 4 * num_parameters * 1.25
                    assert in_between - at_start < 0.02 * 4 * num_parameters
                ip("link", "set", here, "down")
                await fleet.forward_backward(samples_of(3))
                with pytest.raises(Exception, match="node"):
                    await fleet.optim_step()
        finally:
            for node in nodes:
                node.stop()
