"""Rollout over the nodes of a fleet: the real front with scripted nodes."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from tasuki.fleet.rollout_front import RolloutFront
from tasuki.rollout.seeds import CallNumbers, CallSeeds
from tasuki.v1 import rollout_pb2, types_pb2
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub, add_RolloutServiceServicer_to_server
from tasuki.wire.errors import Asleep, InvalidArgument, PeerUnavailable, SamplesLost, TasukiError, VersionOrder, from_rpc_error
from tests.integration.scripted_fleet import ScriptedFleet, scripted_fleet, served
from tests.integration.scripted_node import ScriptedNode
from tests.refusal import refused

if TYPE_CHECKING:
    from tasuki.v1.rollout_pb2_grpc import RolloutServiceAsyncStub

TIMEOUT_S = 10.0


class Node(ScriptedNode):
    """Serves version 3."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self.phase = types_pb2.PHASE_ROLLOUT
        self.served_version: int | None = 3
        self.boot_id = str(state_dir)

    async def Generate(self, request, context):
        async with aclosing(super().Generate(request, context)) as responses:
            async for response in responses:
                response.samples[0].policy_version = self.served_version
                yield response

    async def GetRolloutState(self, request, context):
        return rollout_pb2.GetRolloutStateResponse(
            boot_id=self.boot_id, policy_version=self.served_version, num_running=2, dp_size=1, tp_size=1, vocab_size=64
        )


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tasuki-") as name:
        yield Path(name)


@asynccontextmanager
async def front(
    folder: Path, *, num_nodes: int = 2, is_seeded: bool = False
) -> AsyncIterator[tuple[ScriptedFleet, RolloutServiceAsyncStub]]:
    async with scripted_fleet(folder, num_nodes=num_nodes, make=Node) as fleet:
        seeds = CallSeeds(0, CallNumbers(folder / "calls", instance_id="i")) if is_seeded else None

        def make() -> RolloutFront:
            return RolloutFront(fleet, seeds=seeds)

        add = add_RolloutServiceServicer_to_server
        async with served(folder / "front", service="rollout", add=add, make=make) as channel:
            yield fleet, RolloutServiceStub(channel)


def request(num_prompts: int, *, num_samples: int = 2, **fields) -> rollout_pb2.GenerateRequest:
    prompts = [rollout_pb2.Prompt(token_ids=[10 + position, 1]) for position in range(num_prompts)]
    return rollout_pb2.GenerateRequest(prompts=prompts, num_samples=num_samples, **fields)


async def samples_of(stub: RolloutServiceAsyncStub, asked: rollout_pb2.GenerateRequest) -> list[types_pb2.Sample]:
    return [sample async for response in stub.Generate(asked, timeout=TIMEOUT_S) for sample in response.samples]


async def until_error(
    stub: RolloutServiceAsyncStub, asked: rollout_pb2.GenerateRequest
) -> tuple[list[types_pb2.Sample], TasukiError]:
    got: list[types_pb2.Sample] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for response in stub.Generate(asked, timeout=TIMEOUT_S):
            got += response.samples
    return got, from_rpc_error(raised.value)


async def test_samples_of_all_nodes_come_back_under_the_callers_positions(folder: Path) -> None:
    async with front(folder, num_nodes=3) as (fleet, stub):
        got = await samples_of(stub, request(7))
        # The scripted engine answers with the prompt's first token.
        assert sorted((sample.prompt_index, sample.sample_index, sample.token_ids[0]) for sample in got) == [
            (prompt, sample, 10 + prompt) for prompt in range(7) for sample in range(2)
        ]
        assert [len(asked.prompts) for node in fleet.nodes for asked in node.requests] == [3, 2, 2]


async def test_each_share_says_where_its_prompts_stand_so_that_seeds_are_those_of_one_node(folder: Path) -> None:
    async with front(folder) as (fleet, stub):
        sampling = types_pb2.SamplingParams(sampling_seed=5, temperature=0.5)
        await samples_of(stub, request(4, first_prompt=100, sampling_params=sampling))
        asked = [asked for node in fleet.nodes for asked in node.requests]
        assert [(one.first_prompt, one.sampling_params) for one in asked] == [(100, sampling), (102, sampling)]


async def test_a_repeat_samples_by_the_same_seed_wherever_its_prompts_go(folder: Path) -> None:
    async with front(folder, is_seeded=True) as (fleet, stub):
        for request_id in ("a", "b", "a"):
            await samples_of(stub, request(4, request_id=request_id))
        seeds = [[asked.sampling_params.sampling_seed for asked in node.requests] for node in fleet.nodes]
        assert seeds[0] == seeds[1]
        assert seeds[0][0] == seeds[0][2] != seeds[0][1]


async def test_a_session_stays_on_its_node_and_samples_as_any_other(folder: Path) -> None:
    async with front(folder, is_seeded=True) as (fleet, stub):
        for key in ("a", "b", "", "a", "b"):
            await samples_of(stub, request(1, call_number=4, session_key=key))
        asked = [[(one.session_key, one.sampling_params.sampling_seed) for one in node.requests] for node in fleet.nodes]
        assert [[key for key, _ in node] for node in asked if node[0][0] == "b"] == [["b", "b"]]
        assert len({seed for node in asked for _, seed in node}) == 1


async def test_a_node_that_has_much_to_do_gets_fewer_prompts(folder: Path) -> None:
    async with front(folder) as (fleet, stub):
        fleet.nodes[0].hang.clear()
        first = asyncio.create_task(samples_of(stub, request(1, num_samples=6)))
        while not fleet.nodes[0].requests:
            await asyncio.sleep(0.01)
        assert len(await samples_of(stub, request(2, num_samples=3))) == 6
        assert [len(node.requests) for node in fleet.nodes] == [1, 1]
        fleet.nodes[0].hang.set()
        assert len(await first) == 6


async def test_a_lost_nodes_prompts_are_named_and_the_others_samples_come(folder: Path) -> None:
    async with front(folder, num_nodes=3) as (fleet, stub):
        fleet.nodes[1].hang.clear()
        running = asyncio.create_task(until_error(stub, request(6)))
        while not all(node.requests for node in fleet.nodes):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await fleet.lose(1)
        got, error = await running
        assert isinstance(error, SamplesLost)
        # Samples stream in reverse order: one of prompt 3 had arrived when the node was lost.
        assert error.metadata == {"nodes": "1", "prompts": "2-3"}
        assert Counter(sample.prompt_index for sample in got) == {0: 2, 1: 2, 3: 1, 4: 2, 5: 2}


async def test_a_sleeping_node_refuses_for_all(folder: Path) -> None:
    async with front(folder) as (fleet, stub):
        fleet.nodes[1].phase = types_pb2.PHASE_TRAIN
        _, error = await until_error(stub, request(2))
        assert isinstance(error, Asleep) and error.metadata["node_rank"] == "1"


async def test_a_bad_prompt_has_the_callers_position(folder: Path) -> None:
    async with front(folder) as (_, stub):
        asked = request(4)
        asked.prompts[3].ClearField("token_ids")
        _, error = await until_error(stub, asked)
        assert isinstance(error, InvalidArgument)
        assert error.metadata["field"] == "prompts[3]" and error.message.startswith("prompts[3]")


async def test_two_versions_in_one_call_are_an_error(folder: Path) -> None:
    async with front(folder) as (fleet, stub):
        node = fleet.nodes[1]
        assert isinstance(node, Node)
        node.served_version = 4
        _, error = await until_error(stub, request(2))
        assert isinstance(error, VersionOrder)
        assert {error.metadata["have"], error.metadata["want"]} == {"3", "4"}


async def test_leaving_early_frees_every_node(folder: Path) -> None:
    async with front(folder) as (fleet, stub):
        for node in fleet.nodes:
            node.hang.clear()
        call = stub.Generate(request(2), timeout=TIMEOUT_S)
        answers = aiter(call)
        for _ in fleet.nodes:  # a call that has not reached its node leaves nothing there
            await anext(answers)
        call.cancel()
        await asyncio.wait_for(asyncio.gather(*(node.left_early.wait() for node in fleet.nodes)), 60)


async def test_the_state_is_that_of_all_nodes(folder: Path) -> None:
    async with front(folder) as (fleet, stub):
        state = await stub.GetRolloutState(rollout_pb2.GetRolloutStateRequest(epoch=9), timeout=TIMEOUT_S)
        assert (state.policy_version, state.num_running, state.dp_size, state.tp_size) == (3, 4, 2, 1)
        node = fleet.nodes[1]
        assert isinstance(node, Node)
        node.served_version = 4
        other = await stub.GetRolloutState(rollout_pb2.GetRolloutStateRequest(), timeout=TIMEOUT_S)
        assert not other.HasField("policy_version") and other.boot_id == state.boot_id
        node.boot_id = "another"
        restarted = await stub.GetRolloutState(rollout_pb2.GetRolloutStateRequest(), timeout=TIMEOUT_S)
        assert restarted.boot_id != state.boot_id
        await fleet.lose(1)
        error = await refused(stub.GetRolloutState(rollout_pb2.GetRolloutStateRequest(), timeout=TIMEOUT_S))
        assert isinstance(error, PeerUnavailable) and error.metadata["node_rank"] == "1"
