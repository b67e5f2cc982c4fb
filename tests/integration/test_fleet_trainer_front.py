"""Trainers over the nodes of a fleet: the real front with scripted nodes."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tasuki.fleet.trainer_front import TrainerFront
from tasuki.trainer.data.cost import SampleCost
from tasuki.trainer.data.plan import split_samples
from tasuki.v1 import loss_pb2
from tasuki.v1 import trainer_pb2 as trainer
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub, add_TrainerServiceServicer_to_server
from tasuki.v1.types_pb2 import ROLE_POLICY, ROLE_REFERENCE, CommandId, TrainingSample
from tasuki.wire.channel import MAX_CHUNK_BYTES
from tasuki.wire.errors import (
    DiskFull,
    InvalidArgument,
    NoGradients,
    PathExists,
    PeerUnavailable,
    TasukiError,
    VersionOrder,
)
from tasuki.wire.routes import Whole
from tests.integration.scripted_fleet import ScriptedFleet, scripted_fleet, served
from tests.integration.scripted_node import ScriptedNode
from tests.refusal import refused

if TYPE_CHECKING:
    from tasuki.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

TIMEOUT_S = 10.0
EPOCH = 4
COST = SampleCost(linear=1.0, quadratic=0.0)


class Node(ScriptedNode):
    """A trainer that follows the rules of a fleet's node."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self.calls: list[str] = []
        """Executed and validated methods, the latter with a "?", and parts of saves."""
        self.headers: list[trainer.ForwardBackwardHeader] = []
        self.shares: list[list[TrainingSample]] = []
        self.saved: dict[str, str] = {}
        self.refuses: dict[str, TasukiError] = {}
        """Errors by entry of `calls`."""
        self.roles = 1

    def _look(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refuses:
            raise self.refuses[name]

    async def _run(self, request, work):
        return await (work() if request.validate_only else self.gate.once(request, work))

    async def ForwardBackward(self, request_iterator, context):
        messages = [message async for message in request_iterator]
        header, samples = messages[0].header, [one for message in messages[1:] for one in message.samples.samples]
        for index, sample in enumerate(samples):
            if not sample.completion_token_ids:
                raise InvalidArgument(f"samples[{index}].completion_token_ids", "empty")

        async def work():
            self._look("ForwardBackward?" if header.validate_only else "ForwardBackward")
            if not header.validate_only:
                self.pending.add(header.role)
                self.headers.append(header)
                self.shares.append(samples)
            counted = float(sum(len(sample.completion_token_ids) for sample in samples))
            parts = {"tokens": trainer.MetricPart(total=10 * counted, weight=counted)} if counted else {}
            longest = max((len(sample.completion_token_ids) for sample in samples), default=0)
            return trainer.ForwardBackwardResponse(
                loss=counted / header.loss.settings["denominator"],
                num_samples=len(samples),
                num_tokens=int(counted),
                num_micro_batches=1,
                metric_parts={**parts, "longest": trainer.MetricPart(total=longest, weight=counted, is_maximum=True)},
                log_probs=[
                    trainer.TokenLogProbs(log_probs=[-float(samples[place].completion_token_ids[0])])
                    for place in header.log_probs_of
                ],
            )

        return await self._run(header, work)

    async def OptimStep(self, request, context):
        async def work():
            self._look("OptimStep?" if request.validate_only else "OptimStep")
            is_repeat = request.validate_only and self.gate.has_begun(request)
            if request.role not in self.pending and not is_repeat:
                raise NoGradients("call ForwardBackward first")
            if not request.validate_only:
                self.pending.remove(request.role)
                self.policy_version += 1
            return trainer.OptimStepResponse(version=self.policy_version, grad_norm=2.0)

        return await self._run(request, work)

    async def BeginRun(self, request, context):
        async def work():
            self._look("BeginRun?" if request.validate_only else "BeginRun")
            return trainer.BeginRunResponse(policy_version=self.policy_version)

        return await self._run(request, work)

    async def SaveCheckpoint(self, request, context):
        async def work():
            name = trainer.SavePart.Name(request.part).removeprefix("SAVE_PART_")
            self._look(name)
            if name == "WRITE":
                self.saved[request.save_id] = "written"
            elif name == "PUBLISH":
                assert self.saved[request.save_id] == "written"
                self.saved[request.save_id] = "published"
            else:
                self.saved.pop(request.save_id, None)
            return trainer.SaveCheckpointResponse(policy_version=self.policy_version, bytes=5)

        return await self.gate.once(request, work)

    async def LoadCheckpoint(self, request, context):
        async def work():
            self._look("LoadCheckpoint?" if request.validate_only else "LoadCheckpoint")
            return trainer.LoadCheckpointResponse(policy_version=7)

        return await self._run(request, work)

    async def ExportModel(self, request, context):
        self._look("ExportModel")
        return trainer.ExportModelResponse(policy_version=self.policy_version)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tasuki-") as name:
        yield Path(name)


@asynccontextmanager
async def front(
    folder: Path, *, num_nodes: int = 2
) -> AsyncIterator[tuple[list[Node], TrainerServiceAsyncStub, ScriptedFleet]]:
    async with scripted_fleet(folder, num_nodes=num_nodes, make=Node) as fleet:

        def make() -> TrainerFront:
            return TrainerFront(fleet, epoch=EPOCH, deal=deal(num_nodes))

        add = add_TrainerServiceServicer_to_server
        async with served(folder / "front", service="trainer", add=add, make=make) as channel:
            yield [node for node in fleet.nodes if isinstance(node, Node)], TrainerServiceStub(channel), fleet


def deal(num_nodes: int):
    return lambda lengths, completions: split_samples(
        lengths, completions=completions, num_nodes=num_nodes, num_ranks=1, max_tokens=64, cost=COST
    )


def command(request_id: str = "r", *, epoch: int = EPOCH) -> CommandId:
    return CommandId(epoch=epoch, request_id=request_id)


def samples(lengths: list[int]) -> list[TrainingSample]:
    return [
        TrainingSample(prompt_token_ids=[1], completion_token_ids=[100 + index] * length, loss_mask=[1.0] * length)
        for index, length in enumerate(lengths)
    ]


async def forward_backward(
    stub: TrainerServiceAsyncStub, given: list[TrainingSample], request_id: str = "r", **fields
) -> trainer.ForwardBackwardResponse:
    loss = loss_pb2.LossConfig(name="sft")
    header = trainer.ForwardBackwardHeader(command=command(request_id), role=ROLE_POLICY, loss=loss, **fields)
    messages = [
        trainer.ForwardBackwardRequest(header=header),
        trainer.ForwardBackwardRequest(samples=trainer.TrainingSamples(samples=given)),
    ]
    return await stub.ForwardBackward(iter(messages), timeout=TIMEOUT_S)


def step(request_id: str = "s", *, epoch: int = EPOCH) -> trainer.OptimStepRequest:
    return trainer.OptimStepRequest(command=command(request_id, epoch=epoch), role=ROLE_POLICY)


async def test_samples_are_dealt_once_and_the_answer_is_that_of_the_whole_call(folder: Path) -> None:
    async with front(folder) as (nodes, stub, _):
        answer = await forward_backward(stub, samples([4, 1, 2, 3]), log_probs_of=[3, 0, 1])
        dealt = [[sample.completion_token_ids[0] - 100 for sample in node.shares[0]] for node in nodes]
        assert sorted(position for share in dealt for position in share) == [0, 1, 2, 3]
        assert [sum(len(sample.completion_token_ids) for sample in node.shares[0]) for node in nodes] == [5, 5]
        assert [header.loss.settings["denominator"] for node in nodes for header in node.headers] == [10.0, 10.0]
        headers = [header for node in nodes for header in node.headers]
        assert all(header.is_share and header.command.epoch == 0 and header.call_samples == 4 for header in headers)
        assert (answer.loss, answer.num_samples, answer.num_tokens, answer.denominator) == (1.0, 4, 10, 10.0)
        assert dict(answer.metrics) == {"tokens": 10.0, "longest": 4.0}
        assert [row.log_probs[0] for row in answer.log_probs] == [-103.0, -100.0, -101.0]


@pytest.mark.parametrize("name", ["BeginRun", "OptimStep", "LoadCheckpoint"])
async def test_a_command_that_one_node_refuses_begins_on_none(folder: Path, name: str) -> None:
    async with front(folder) as (nodes, stub, _):
        await forward_backward(stub, samples([1, 1]))
        nodes[1].refuses[f"{name}?"] = VersionOrder("older")
        request = {
            "BeginRun": trainer.BeginRunRequest(command=command("x")),
            "OptimStep": step("x"),
            "LoadCheckpoint": trainer.LoadCheckpointRequest(command=command("x"), path="/c"),
        }[name]
        error = await refused(getattr(stub, name)(request, timeout=TIMEOUT_S))
        assert isinstance(error, VersionOrder) and error.metadata["node_rank"] == "1"
        assert not any(name in node.calls for node in nodes)


async def test_versions_that_differ_are_an_error(folder: Path) -> None:
    async with front(folder) as (nodes, stub, _):
        await forward_backward(stub, samples([1, 1]))
        nodes[1].policy_version = 5
        error = await refused(stub.OptimStep(step(), timeout=TIMEOUT_S))
        assert isinstance(error, VersionOrder) and (error.metadata["have"], error.metadata["want"]) == ("0", "5")
        assert not any("OptimStep" in node.calls for node in nodes)


async def test_an_absent_node_is_asked_again_by_the_same_request(folder: Path) -> None:
    async with front(folder) as (nodes, stub, _):
        nodes[1].refuses["ForwardBackward?"] = PeerUnavailable("it restarts")
        assert isinstance(await refused(forward_backward(stub, samples([1, 1]))), PeerUnavailable)
        nodes[1].refuses.clear()
        nodes[1].gate = type(nodes[1].gate)()  # as after a restart
        assert (await forward_backward(stub, samples([1, 1]))).num_samples == 2


async def test_a_checkpoint_is_published_once_all_nodes_have_written_it(folder: Path) -> None:
    async with front(folder) as (nodes, stub, _):
        request = trainer.SaveCheckpointRequest(command=command(), path="/c")
        answer = await stub.SaveCheckpoint(request, timeout=TIMEOUT_S)
        assert [node.calls for node in nodes] == [["WRITE", "PUBLISH"]] * 2 and answer.bytes == 10
        assert nodes[0].saved == nodes[1].saved and set(nodes[0].saved.values()) == {"published"}
        assert await stub.SaveCheckpoint(request, timeout=TIMEOUT_S) == answer
        assert [len(node.calls) for node in nodes] == [2, 2]


@pytest.mark.parametrize("error", [DiskFull("no room"), PathExists("there")])
async def test_a_checkpoint_that_one_node_cannot_write_is_dropped_everywhere(folder: Path, error: TasukiError) -> None:
    async with front(folder) as (nodes, stub, _):
        nodes[1].refuses["WRITE"] = error
        request = trainer.SaveCheckpointRequest(command=command(), path="/c")
        got = await refused(stub.SaveCheckpoint(request, timeout=TIMEOUT_S))
        assert type(got) is type(error)
        assert [node.calls for node in nodes] == [["WRITE", "DROP"]] * 2
        assert not nodes[0].saved


async def test_scores_come_in_the_order_of_the_samples(folder: Path) -> None:
    async with front(folder, num_nodes=3) as (_, stub, _):
        given = samples([5, 1, 2, 3, 1])
        messages = [
            trainer.ComputeLogProbsRequest(header=trainer.ComputeLogProbsHeader(role=ROLE_REFERENCE)),
            trainer.ComputeLogProbsRequest(samples=trainer.TrainingSamples(samples=given)),
        ]
        rows = [row async for part in stub.ComputeLogProbs(iter(messages), timeout=TIMEOUT_S) for row in part.samples]
        assert [list(row.log_probs) for row in rows] == [[-100.0 - index] * n for index, n in enumerate([5, 1, 2, 3, 1])]
        values = [trainer.ComputeValuesRequest(samples=trainer.TrainingSamples(samples=given[:2]))]
        valued = [row async for part in stub.ComputeValues(iter(values), timeout=TIMEOUT_S) for row in part.samples]
        assert [list(row.values) for row in valued] == [[100.0] * 5, [101.0]]


async def test_experts_of_the_old_policy_come_with_their_samples_though_they_travel_in_parts(folder: Path) -> None:
    async with front(folder, num_nodes=3) as (_, stub, _):
        given = samples([5, 1, 2, 3, 1])
        messages = [
            trainer.ComputeLogProbsRequest(header=trainer.ComputeLogProbsHeader(role=ROLE_POLICY, is_old_policy=True)),
            trainer.ComputeLogProbsRequest(samples=trainer.TrainingSamples(samples=given)),
        ]
        whole = Whole()
        answers = stub.ComputeLogProbs(iter(messages), timeout=TIMEOUT_S)
        rows = [row async for part in answers for row in whole.samples(part.samples)]
        assert [len(row.log_probs) for row in rows] == [5, 1, 2, 3, 1]
        assert [row.routed_experts for row in rows] == [bytes([100 + index]) * MAX_CHUNK_BYTES for index in range(5)]


async def test_calls_without_samples_or_with_samples_that_are_not_there_are_refused(folder: Path) -> None:
    async with front(folder) as (nodes, stub, _):
        for given, fields, field in (
            ([], {}, "samples"),
            (samples([1]), {"log_probs_of": [1]}, "header.log_probs_of"),
            ([TrainingSample(prompt_token_ids=[1], completion_token_ids=[2], loss_mask=[0.0])], {}, "samples[].loss_mask"),
        ):
            error = await refused(forward_backward(stub, given, f"r{field}", **fields))
            assert isinstance(error, InvalidArgument) and error.metadata["field"] == field
        assert not any(node.calls for node in nodes)


async def test_the_state_is_that_of_all_nodes(folder: Path) -> None:
    async with front(folder) as (nodes, stub, _):
        nodes[1].policy_version = 1
        nodes[1].pending.add(ROLE_POLICY)
        state = await stub.GetTrainerState(trainer.GetTrainerStateRequest(), timeout=TIMEOUT_S)
        assert state.policy_version == 0 and state.has_gradients and state.roles[0].version == 0
