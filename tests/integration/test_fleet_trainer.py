"""Trainers of two nodes as one: real FSDP over gloo. Each node is a separate launch; they meet through the fleet's port by mTLS."""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import grpc.aio
import pytest

from tasuki.algorithms.loss_types import Aggregation, LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.client.encode import loss_to_proto
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import PeerUnavailable, from_rpc_error
from tests.extent import only_whole
from tests.integration.fleet_port import FleetPort, fleet_port
from tests.integration.fleet_trainers import fleet_of, nodes_of, start_node
from tests.integration.trainer_process import TrainerProcess, connect, start_trainer
from tests.integration.trainer_samples import make_samples
from tests.limits import limit_s
from tests.models import VOCAB_SIZE, make_model, save_checkpoint
from tests.unit.every_loss import EXAMPLES

NUM_STEPS = 20
SETTINGS = (
    'learning_rate = 1e-3\neps = 1e-3\nmicro_batch_tokens = 64\ncompute_dtype = "float32"\n'
    "[coordinator]\nstage_timeout_s = 30\n"
)
LOSSES = [
    loss_to_proto(LossConfig(loss=loss, aggregation=aggregation, aggregation_length=16 if aggregation == "constant" else None))
    for loss, aggregation in zip(
        [one for one in EXAMPLES if not isinstance(one, ValueLoss)], itertools.cycle(Aggregation), strict=False
    )
]
"""One loss per step: every policy loss, and every aggregation."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return save_checkpoint(make_model("llama", seed=3), folder / "model")


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[FleetPort]:
    with fleet_port(folder / "port", num_nodes=2) as served:
        yield served


@pytest.fixture(scope="module")
def alone(folder: Path, model: Path) -> Iterator[TrainerProcess]:
    trainer = start_trainer(folder / "alone", model, num_ranks=1, settings=SETTINGS)
    try:
        yield trainer
    finally:
        trainer.stop()


@pytest.fixture(scope="module")
def nodes(alone: TrainerProcess, folder: Path, model: Path, port: FleetPort) -> Iterator[list[TrainerProcess]]:
    with nodes_of(folder, model, num_nodes=2, settings=SETTINGS, port=port) as started:
        alone.wait_until_serving()
        yield started


def samples_of(step: int, num_samples: int = 8) -> list[TrainingSample]:
    return make_samples(num_samples, vocab_size=VOCAB_SIZE, seed=step, policy_version=step)


async def test_two_nodes_learn_as_one(folder: Path, model: Path, alone: TrainerProcess, nodes: list[TrainerProcess]) -> None:
    """Results do not depend on the shares: by the plan, all to one node, or with many more micro-batches on one."""
    uneven = [[0, 1, 2, 3, 4, 5, 6, 7], []], [[7], [0, 1, 2, 3, 4, 5, 6]]
    async with fleet_of(nodes, model) as fleet, connect(alone) as one:
        for step in range(NUM_STEPS):
            samples, loss = samples_of(step), LOSSES[step % len(LOSSES)]
            expected = await one.forward_backward(samples, loss=loss)
            fleet.dealt = uneven[step % 2] if step % 5 == 0 else None
            got = await fleet.forward_backward(samples, loss=loss, log_probs_of=[6, 1])
            assert got.loss == pytest.approx(expected.loss, abs=1e-5)
            assert got.denominator == expected.denominator
            assert dict(got.metrics) == pytest.approx(dict(expected.metrics), abs=1e-4)
            stepped = await fleet.optim_step(request_id=f"step {step}")
            assert stepped.grad_norm == pytest.approx((await one.optim_step()).grad_norm, rel=1e-4)
        await fleet.save(folder / "checkpoint")
        # A checkpoint can be continued on any number of nodes.
        assert (await one.load(folder / "checkpoint")).policy_version == NUM_STEPS
        scores = [await client.log_probs(samples_of(99)) for client in (one, *fleet.clients)]
        assert scores[0] == scores[1] == scores[2]
    # The front of another life of the leader, asked again for what all nodes have done.
    async with fleet_of(nodes, model) as again:
        assert (await again.optim_step(request_id=f"step {NUM_STEPS - 1}")).version == NUM_STEPS


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
async def test_two_nodes_of_tensor_parallel_ranks_learn_as_one_rank(tmp_path: Path) -> None:
    vocab_size, layout = 132, 'backend = "megatron"\nmegatron.tensor_parallel = 2\n'
    model = save_checkpoint(make_model("llama", seed=3, vocab_size=vocab_size), tmp_path / "model")
    alone = start_trainer(tmp_path / "alone", model, num_ranks=1, settings=SETTINGS)
    try:
        with nodes_of(tmp_path, model, num_nodes=2, num_ranks=2, settings=layout + SETTINGS) as nodes:
            alone.wait_until_serving()
            async with fleet_of(nodes, model, num_ranks=2) as fleet, connect(alone) as one:
                for step in range(3):
                    samples = samples_of(step)
                    expected, got = await one.forward_backward(samples), await fleet.forward_backward(samples)
                    assert got.loss == pytest.approx(expected.loss, abs=1e-5)
                    stepped = await fleet.optim_step(request_id=f"step {step}")
                    assert stepped.grad_norm == pytest.approx((await one.optim_step()).grad_norm, rel=1e-4)
                scores = [await client.log_probs(samples_of(99)) for client in fleet.clients]
                assert scores[0] == scores[1]
    finally:
        alone.stop()


async def test_a_refused_share_leaves_no_node_with_gradients(model: Path, nodes: list[TrainerProcess]) -> None:
    async with fleet_of(nodes, model) as fleet:
        samples = samples_of(0)
        samples[5].completion_token_ids[0] = VOCAB_SIZE
        fleet.dealt = [[0, 1], [2, 3, 4, 5]]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fleet.forward_backward(samples)
        assert from_rpc_error(refused.value).metadata["field"] == "samples[5].completion_token_ids[0]"
        assert [(await client.state()).has_gradients for client in fleet.clients] == [False, False]
        with pytest.raises(grpc.aio.AioRpcError, match="NO_GRADIENTS|no gradients"):
            await fleet.optim_step()


async def test_a_killed_node_fails_the_others_and_all_go_on_after_a_restart(
    folder: Path, model: Path, port: FleetPort, nodes: list[TrainerProcess]
) -> None:
    async with fleet_of(nodes, model) as fleet:
        version = (await fleet.clients[0].state()).policy_version
        await fleet.forward_backward(samples_of(version))
        for pid in nodes[1].rank_pids():
            os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await fleet.clients[0].optim_step()
        assert isinstance(from_rpc_error(lost.value), PeerUnavailable)
        assert time.monotonic() - started < limit_s(40)
    assert nodes[0].process.wait(60) != 0
    again = [start_node(folder, model, port, rank, settings=SETTINGS) for rank in range(2)]
    try:
        for node in again:
            node.wait_until_serving()
        async with fleet_of(again, model) as fleet:
            states = [await client.state() for client in fleet.clients]
            assert [(state.policy_version, state.has_gradients) for state in states] == [(version, True)] * 2
            assert (await fleet.optim_step()).version == version + 1
    finally:
        for node in again:
            node.stop()


@only_whole
async def test_a_trainer_that_is_killed_between_steps_has_the_others_start_again(folder: Path, model: Path, port: FleetPort):
    """No collective runs that would tell the nodes."""
    with nodes_of(folder / "between", model, num_nodes=2, settings=SETTINGS, port=port) as nodes:
        async with fleet_of(nodes, model) as fleet:
            await fleet.forward_backward(samples_of(0))
            await fleet.optim_step()
        for pid in nodes[1].rank_pids():
            os.kill(pid, signal.SIGKILL)
        nodes[1].process.wait(30)
        again = start_node(folder / "between", model, port, 1, settings=SETTINGS)
        try:
            assert nodes[0].process.wait(30) == 1
            nodes[0] = start_node(folder / "between", model, port, 0, settings=SETTINGS)
            for node in (nodes[0], again):
                node.wait_until_serving()
            async with fleet_of([nodes[0], again], model) as fleet:
                assert [(await client.state()).policy_version for client in fleet.clients] == [1, 1]
                await fleet.forward_backward(samples_of(1))
                assert (await fleet.optim_step()).version == 2
        finally:
            again.stop()
