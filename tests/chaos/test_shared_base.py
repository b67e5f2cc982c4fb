"""A whole node whose trainer and engine read one copy of the model below the adapters: each of them is killed, and finds it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from safetensors.torch import load_file

from tasuki.client import Client, Phase, Stage
from tasuki.v1 import types_pb2
from tests.base_copies import shared_by
from tests.chaos_node import ChaosNode
from tests.conftest import RunningNode, started_node
from tests.e2e.test_residency import round_bytes, tags

pytestmark = pytest.mark.timeout(600)
_ONE_RANK = ["trainer.num_ranks=1", "rollout.lora=adapter", "trainer.lora.rank=4"]


@pytest.fixture(scope="module")
def sharing() -> Iterator[RunningNode]:
    with started_node(overrides=[*_ONE_RANK, "trainer.lora.share_base=true"]) as started:
        yield started


def base_of(chaos: ChaosNode) -> frozenset[int]:
    (trainer,), (engine,) = chaos.pids("trainer0"), chaos.pids("scheduler0")
    return shared_by(trainer, engine)


def weight_bytes(sizes: Sequence[types_pb2.TagUsage]) -> int:
    return sum(tag.mapped_bytes for tag in sizes if tag.tag == types_pb2.MEMORY_TAG_WEIGHTS)


def test_samples_and_steps_are_those_of_two_copies(sharing: RunningNode) -> None:
    outcomes, mapped = [], []
    with started_node(overrides=_ONE_RANK) as apart:
        for node in (sharing, apart):
            with Client(state_dir=node.state_dir) as client:
                chaos = ChaosNode(node, client)
                chaos.step()
                client.acquire(Phase.ROLLOUT)
                samples = client.generate([[5, 6, 7], [8, 9]], num_samples=2)
                drawn = [(sample.token_ids.tolist(), sample.rollout_log_probs.tolist()) for sample in samples]
                outcomes.append((chaos.learned, chaos.greedy(), drawn))
                client.acquire(Phase.TRAIN)
                assert bool(base_of(chaos)) is (node is sharing)
                sizes = tags(node)
                mapped.append([weight_bytes(sizes["trainer"]), weight_bytes(sizes["rollout"])])
    assert outcomes[0] == outcomes[1]
    assert mapped[0] == [0, mapped[1][1]] and mapped[1][0] > 0, "one copy, counted once"


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("process", ["trainer0", "scheduler0", "trainer", "rollout"])
def test_a_service_that_is_killed_reads_the_same_memory_again(sharing: RunningNode, process: str, phase: Phase) -> None:
    with Client(state_dir=sharing.state_dir, timeout_s=240) as client:
        chaos = ChaosNode(sharing, client)
        client.acquire(Phase.ROLLOUT)
        base = base_of(chaos)
        assert base
        client.acquire(Phase.TRAIN)
        chaos.lose(process, phase=phase)
        assert base_of(chaos) == base


def test_stages_move_the_adapter_alone(sharing: RunningNode) -> None:
    with Client(state_dir=sharing.state_dir) as client:
        client.acquire(Phase.TRAIN)
        round_bytes(client)
        moved = round_bytes(client)
    model_bytes = sum(tensor.nbytes for tensor in load_file(sharing.model / "model.safetensors").values())
    assert moved[Stage.SYNC] < model_bytes / 2
    assert moved[Stage.RESUME_WEIGHTS] == moved[Stage.PAUSE_WEIGHTS] == 0
