"""A node whose trainer and engine share one copy of the model below the adapters: each is killed, and finds it again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from safetensors.torch import load_file

from tasuki.client import Client, Phase, Stage
from tasuki.v1 import types_pb2
from tests.base_copies import shared_by
from tests.chaos_node import ChaosNode
from tests.conftest import NOTHING_STAYS, RunningNode, started_node
from tests.e2e.test_residency import round_bytes, tags

pytestmark = pytest.mark.timeout(600)
# Sizes by number of ranks: two cannot share tensors that the engine pads, which on a CPU includes other MLPs.
_SIZES: dict[int, dict[str, int]] = {1: {}, 2: {"vocab_size": 128, "intermediate_size": 128}}


def apart(num_ranks: int) -> list[str]:
    return [f"trainer.num_ranks={num_ranks}", f"rollout.tp_size={num_ranks}", "rollout.lora=adapter", "trainer.lora.rank=4"]


@dataclass(frozen=True)
class Sharing:
    node: RunningNode
    num_ranks: int


@pytest.fixture(scope="module", params=[1, 2])
def sharing(request: pytest.FixtureRequest) -> Iterator[Sharing]:
    with started_node(
        overrides=apart(request.param), choices={**NOTHING_STAYS, "shares_base": True}, **_SIZES[request.param]
    ) as started:
        yield Sharing(started, request.param)


def bases_of(chaos: ChaosNode, *, num_ranks: int) -> list[frozenset[int]]:
    """Chunks that the trainer rank and the engine rank both read, for each rank."""
    bases: list[frozenset[int]] = []
    for rank in range(num_ranks):
        (trainer,), (engine,) = chaos.pids(f"trainer{rank}"), chaos.pids(f"scheduler{rank}")
        bases.append(shared_by(trainer, engine))
    assert len(frozenset().union(*bases)) == sum(map(len, bases)), "each rank has its own"
    return bases


def weight_bytes(sizes: Sequence[types_pb2.TagUsage]) -> list[int]:
    """Mapped bytes of the weights, for every rank."""
    return [tag.mapped_bytes for tag in sorted(sizes, key=lambda tag: tag.rank) if tag.tag == types_pb2.MEMORY_TAG_WEIGHTS]


def test_samples_and_steps_are_those_of_two_copies(sharing: Sharing) -> None:
    outcomes, mapped, num_ranks = [], [], sharing.num_ranks
    with started_node(overrides=apart(num_ranks), **_SIZES[num_ranks]) as two_copies:
        for node in (sharing.node, two_copies):
            with Client(state_dir=node.state_dir) as client:
                chaos = ChaosNode(node, client)
                chaos.step()
                client.acquire(Phase.ROLLOUT)
                samples = client.generate([[5, 6, 7], [8, 9]], num_samples=2)
                drawn = [(sample.token_ids.tolist(), sample.rollout_log_probs.tolist()) for sample in samples]
                outcomes.append((chaos.learned, chaos.greedy(), drawn))
                client.acquire(Phase.TRAIN)
                assert [bool(base) for base in bases_of(chaos, num_ranks=num_ranks)] == [node is sharing.node] * num_ranks
                sizes = tags(node)
                mapped.append([weight_bytes(sizes["trainer"]), weight_bytes(sizes["rollout"])])
    assert outcomes[0] == outcomes[1]
    assert [size > 0 for size in mapped[1][0]] == [True] * num_ranks
    # Adapters as small as these lie outside the arena.
    assert mapped[0] == [[0] * num_ranks, mapped[1][1]], "one copy, counted once"


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("service", ["trainer", "rollout"])
def test_a_service_that_is_killed_reads_the_same_memory_again(sharing: Sharing, service: str, phase: Phase) -> None:
    # With one rank the front is killed, with two the last rank.
    process = service if sharing.num_ranks == 1 else {"trainer": "trainer1", "rollout": "scheduler1"}[service]
    with Client(state_dir=sharing.node.state_dir, timeout_s=240) as client:
        chaos = ChaosNode(sharing.node, client)
        client.acquire(Phase.ROLLOUT)
        bases = bases_of(chaos, num_ranks=sharing.num_ranks)
        assert all(bases)
        client.acquire(Phase.TRAIN)
        chaos.lose(process, phase=phase)
        assert bases_of(chaos, num_ranks=sharing.num_ranks) == bases


def test_services_that_are_killed_at_once_share_memory_again(sharing: Sharing) -> None:
    last = sharing.num_ranks - 1
    with Client(state_dir=sharing.node.state_dir, timeout_s=240) as client:
        chaos = ChaosNode(sharing.node, client)
        chaos.lose(f"trainer{last}", f"scheduler{last}", phase=Phase.TRAIN)
        assert all(bases_of(chaos, num_ranks=sharing.num_ranks))


def test_stages_move_the_adapter_alone(sharing: Sharing) -> None:
    with Client(state_dir=sharing.node.state_dir) as client:
        client.acquire(Phase.TRAIN)
        round_bytes(client)
        moved = round_bytes(client)
    model_bytes = sum(tensor.nbytes for tensor in load_file(sharing.node.model / "model.safetensors").values())
    assert moved[Stage.SYNC] < model_bytes / 2
    assert moved[Stage.RESUME_WEIGHTS] == moved[Stage.PAUSE_WEIGHTS] == 0
