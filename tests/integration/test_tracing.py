"""Spans of changeovers by a real coordinator for a client, as an OTLP receiver gets them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tasuki.client import AsyncClient, Phase
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.coordinator.phases import path
from tasuki.v1.coordinator_pb2 import GetStateRequest
from tasuki.wire import stages
from tasuki.wire.errors import OutOfGpuMemory
from tests.integration.coordinator_process import DEADLINE_S, Node, running_node
from tests.otlp import ReceivedSpan, Receiver, receiving

TO_ROLLOUT = path(stages.Stage.LOAD_TRAINER, stages.Phase.ROLLOUT)


@asynccontextmanager
async def traced_node(folder: Path, endpoint: str) -> AsyncIterator[Node]:
    config = NodeConfig(state_dir=folder / "state", model=ModelConfig(path=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        async with running_node(config) as node:
            yield node


async def acquire(node: Node, phase: Phase, *, endpoint: str | None) -> None:
    async with AsyncClient(state_dir=node.config.state_dir, otlp_endpoint=endpoint) as client:
        await client.acquire(phase)


def chain(receiver: Receiver, span: ReceivedSpan) -> list[tuple[str, str]]:
    """Service and name of the span and of its ancestors."""
    by_id = {one.span_id: one for one in receiver.spans}
    found = [(span.service, span.name)]
    while span.parent_id:
        span = by_id[span.parent_id]
        found.append((span.service, span.name))
    return found


async def test_a_changeover_is_one_trace_from_the_client_to_the_services(tmp_path: Path) -> None:
    with receiving() as receiver:
        async with traced_node(tmp_path, receiver.endpoint) as node:
            read = node.stub.GetState(
                GetStateRequest(), metadata=[("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")], timeout=DEADLINE_S
            )
            await read  # which has no span
            await acquire(node, Phase.ROLLOUT, endpoint=receiver.endpoint)
        changeover = receiver.one("changeover to ROLLOUT")
        above = [
            ("tasuki-coordinator", "changeover to ROLLOUT"),
            ("tasuki-coordinator", "tasuki.v1.CoordinatorService/Acquire"),
            ("tasuki-client", "tasuki.v1.CoordinatorService/Acquire"),
        ]
        assert chain(receiver, changeover) == above
        stages = [receiver.one(f"stage {stage}") for stage in TO_ROLLOUT]
        assert all(chain(receiver, stage)[1:] == above for stage in stages)
        received = next(
            span for span in receiver.named("tasuki.v1.RolloutService/ReceiveWeights") if span.service == "tasuki-rollout"
        )
        assert chain(receiver, received)[:2] == [
            ("tasuki-rollout", "tasuki.v1.RolloutService/ReceiveWeights"),
            ("tasuki-coordinator", "stage SYNC"),
        ]
    assert {span.trace_id for span in receiver.spans} == {changeover.trace_id}
    calls = receiver.named("tasuki.v1.CoordinatorService/Acquire")
    assert {span.attributes["tasuki.request_id"] for span in (*calls, changeover)} == {
        changeover.attributes["tasuki.request_id"]
    }
    sync = receiver.one("stage SYNC")
    assert (
        received.attributes["tasuki.request_id"] == sync.attributes["tasuki.request_id"] == node.rollout.commands[1].request_id
    )
    assert received.attributes["rpc.response.status_code"] == "OK" and sync.attributes["tasuki.bytes"] == 1000
    assert {span.attributes["tasuki.changeover_id"] for span in (*stages, changeover)} == {
        changeover.attributes["tasuki.changeover_id"]
    }


async def test_a_failed_stage_and_its_undo_are_seen(tmp_path: Path) -> None:
    with receiving() as receiver:
        async with traced_node(tmp_path, receiver.endpoint) as node:
            node.rollout.fail[stages.Stage.SYNC] = OutOfGpuMemory("no room")
            with pytest.raises(OutOfGpuMemory):
                await acquire(node, Phase.ROLLOUT, endpoint=None)
        sync, changeover = receiver.one("stage SYNC"), receiver.one("changeover to ROLLOUT")
        undone = receiver.one("undo RESUME_WEIGHTS")
        served = next(
            span for span in receiver.named("tasuki.v1.RolloutService/ReceiveWeights") if span.service == "tasuki-rollout"
        )
    assert served.is_failed and served.attributes["tasuki.reason"] == OutOfGpuMemory.reason
    assert served.attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    assert sync.is_failed and changeover.is_failed and not undone.is_failed
    assert sync.attributes["tasuki.reason"] == changeover.attributes["tasuki.reason"] == OutOfGpuMemory.reason
    assert undone.parent_id == sync.parent_id == changeover.span_id
