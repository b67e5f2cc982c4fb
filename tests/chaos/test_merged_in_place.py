"""A node whose adapters are merged in the base's own memory: samples and steps are those with a copy, whatever is killed on the way."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tasuki.client import Client, Phase, StageStatus
from tasuki.config.choices import read_choices
from tasuki.config.load import load_config
from tasuki.config.paths import config_path, socket_dir
from tasuki.coordinator.phases import Stage
from tasuki.planner.node import node_of
from tasuki.planner.plan import plan
from tasuki.rpc.failpoints import Action, plant
from tasuki.v1 import types_pb2
from tests.chaos_node import ChaosNode
from tests.conftest import NOTHING_STAYS, RunningNode, assert_clean_audit, started_node
from tests.e2e.test_residency import tags

pytestmark = pytest.mark.timeout(600)
# MLPs large enough to lie in the arena, and to see whether they are copied.
_NODE: dict[str, Any] = {"overrides": ["trainer.lora.rank=8", "trainer.lora.init=gaussian"], "intermediate_size": 8192}
_IN_PLACE = {**NOTHING_STAYS, "merges_in_place": True}


@pytest.fixture(scope="module")
def merging() -> Iterator[RunningNode]:
    with started_node(choices=_IN_PLACE, **_NODE) as started:
        yield started


def copied_bytes(node: RunningNode) -> int:
    return sum(tag.total_bytes for tag in tags(node)["trainer"] if tag.tag == types_pb2.MEMORY_TAG_EXPORT)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_samples_and_steps_are_those_of_a_copy(backend: str) -> None:
    outcomes, copied = list[object](), list[int]()
    given = {**_NODE, "overrides": [*_NODE["overrides"], f"trainer.backend={backend}"]}
    with started_node(choices=_IN_PLACE, **given) as merging, started_node(**given) as copying:
        for node in (merging, copying):
            with Client(state_dir=node.state_dir) as client:
                chaos, seen = ChaosNode(node, client), list[object]()
                for _ in range(3):
                    chaos.step()
                    seen.append(chaos.learned)
                    client.acquire(Phase.ROLLOUT)
                    samples = client.generate([[5, 6, 7], [8, 9]], num_samples=2)
                    seen += [(sample.token_ids.tolist(), sample.rollout_log_probs.tolist()) for sample in samples]
                    client.acquire(Phase.TRAIN)
                outcomes.append(seen)
                copied.append(copied_bytes(node))
            assert_clean_audit(node.state_dir)
    assert outcomes[0] == outcomes[1]
    assert copied[0] < copied[1]


@pytest.mark.parametrize(
    ("process", "stage"),
    [
        ("trainer1", Stage.LOAD_WEIGHTS),
        ("scheduler0", Stage.RESUME_WEIGHTS),
        ("scheduler0", Stage.SYNC),
        ("rollout", Stage.SYNC),
        ("trainer1", Stage.OFFLOAD),
        ("coordinator", Stage.SYNC),
        ("trainer1", Stage.LOAD_TRAINER),
    ],
)
def test_what_is_learned_survives_a_loss_while_weights_are_merged(merging: RunningNode, process: str, stage: Stage) -> None:
    with Client(state_dir=merging.state_dir, timeout_s=240) as client:
        ChaosNode(merging, client).recovers(process, stage, signal.SIGKILL)
    assert_clean_audit(merging.state_dir)


def test_what_a_fault_writes_into_published_memory_is_gone_from_the_base(merging: RunningNode) -> None:
    with Client(state_dir=merging.state_dir, timeout_s=240) as client:
        chaos = ChaosNode(merging, client)
        client.acquire(Phase.TRAIN)
        chaos.step()
        plant(socket_dir(merging.state_dir), "trainer0", "publish_weights", Action.CORRUPT)
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        client.acquire(Phase.TRAIN)
        events = [(event.stage, event.status) for one in client.changeovers(limit=5) for event in one.stages]
        assert (Stage.SYNC.number, StageStatus.FAILED.number) in events
        assert chaos.log_probs() == chaos.learned
        client.acquire(Phase.ROLLOUT)
        assert chaos.greedy() == tokens


def test_a_budget_that_no_copy_fits_is_enough(merging: RunningNode) -> None:
    """The planner's own choice: all that the stages need, to the byte."""
    config = load_config(config_path(merging.state_dir))
    in_place = replace(node_of(config, gpu_bytes=1, host_bytes=10**12), merges_in_place=True)
    budget = plan(in_place).budget_peak.tag_bytes
    assert budget < plan(replace(in_place, merges_in_place=False)).budget_peak.tag_bytes
    given = [*_NODE["overrides"], f"memory.host_budget_bytes={budget}"]
    with started_node(choices={}, **{**_NODE, "overrides": given}) as tight:
        assert read_choices(tight.state_dir).merges_in_place
        with Client(state_dir=tight.state_dir) as client:
            chaos = ChaosNode(tight, client)
            for phase in (Phase.ROLLOUT, Phase.TRAIN) * 2:
                client.acquire(phase)
                assert sum(tag.mapped_bytes for every in tags(tight).values() for tag in every) <= budget
            chaos.step()
            client.acquire(Phase.ROLLOUT)
