"""Stages of the rollout service and its admission of calls, without an engine."""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.rollout.generate import Completion, EngineRequest
from tasuki.rollout.model import ModelFacts
from tasuki.rollout.rollout import Rollout, check_stage
from tasuki.rollout.seeds import CallNumbers, CallSeeds
from tasuki.rpc.memory import decode_move
from tasuki.v1 import weights_pb2
from tasuki.v1.memory_pb2 import PauseRequest, ResumeRequest
from tasuki.v1.rollout_pb2 import GenerateRequest, ReceiveWeightsResponse
from tasuki.wire.errors import (
    Asleep,
    BadHandle,
    DeadlineExceeded,
    Draining,
    EnginePoisoned,
    InternalError,
    InvalidArgument,
    OutOfGpuMemory,
    StageOrder,
    TasukiError,
    VersionOrder,
    WeightsCorrupt,
)
from tasuki.wire.stages import START, MemoryTag, Service, Stage

RING = [Stage.RESUME_WEIGHTS, Stage.SYNC, Stage.RESUME_KV, Stage.DRAIN, Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS]
MODEL = ModelFacts(path="", architecture="", vocab_size=10, context_length=10, stop_token_ids=(1,), is_seeded=False)
# An engine without seeded sampling has no calls to number.
NO_SEEDS = CallSeeds(0, CallNumbers(Path("/nonexistent/calls"), instance_id=""))
REQUEST = GenerateRequest(prompts=[{"token_ids": [1]}], num_samples=1, sampling_params={"max_new_tokens": 1})


class IdleEngine:
    """Answers at once unless it is stuck, which a real engine cannot be on request."""

    def __init__(self) -> None:
        self.model = MODEL
        self.num_running = self.num_finished = self.num_cut = 0
        self.is_stuck = False

    async def become_idle(self, *, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def generate(
        self, requests: Iterator[EngineRequest], *, num_requests: int, prefix: str, **_: object
    ) -> AsyncGenerator[list[tuple[int, Completion]], None]:
        self.num_running += num_requests
        await asyncio.sleep(0)
        if self.is_stuck:
            await asyncio.Event().wait()
        self.num_running -= num_requests
        self.num_finished += num_requests
        yield [(index, Completion([1], [-1.0], "length")) for index, _ in enumerate(requests)]

    def cut_continued(self) -> None: ...

    def cut_all(self) -> None: ...


class EasySync:
    """Receives any weights; fails half-way on request."""

    failure: TasukiError | None = None

    async def prepare(self, weights: weights_pb2.PublishedWeights) -> None: ...

    async def run(self, weights: weights_pb2.PublishedWeights, imported: None, *, timeout_s: float) -> ReceiveWeightsResponse:
        if self.failure is not None:
            raise self.failure
        return ReceiveWeightsResponse(policy_version=weights.policy_version)


class NoMemory:
    """Tags of an engine that holds nothing; without room on request."""

    is_full = False

    async def pause(self, tags: list[MemoryTag], *, timeout_s: float) -> int:
        return 0

    async def resume(self, tags: list[MemoryTag], *, timeout_s: float) -> int:
        if self.is_full:
            raise OutOfGpuMemory("no room", needed_bytes=2, free_bytes=1)
        return 0


async def said(is_serving: bool) -> None: ...


def service() -> Rollout:
    return Rollout(IdleEngine(), EasySync(), NoMemory(), seeds=NO_SEEDS, on_serving=said, on_poison=lambda: None)


async def move(rollout: Rollout, stage: Stage, *, version: int = 0) -> None:
    if stage is Stage.SYNC:
        await rollout.receive(weights_pb2.PublishedWeights(policy_version=version), timeout_s=1)
    elif stage is Stage.DRAIN:
        await rollout.drain(grace_s=0, timeout_s=60)
    elif stage in (Stage.RESUME_WEIGHTS, Stage.RESUME_KV):
        await rollout.resume(stage, [], timeout_s=1)
    else:
        await rollout.pause(stage, [], timeout_s=1)


async def samples(rollout: Rollout) -> list[int]:
    return [sample.policy_version async for ended in rollout.generate(REQUEST) for sample in ended]


ACCEPTED = {
    None: {Stage.RESUME_WEIGHTS},
    Stage.RESUME_WEIGHTS: {Stage.SYNC, Stage.PAUSE_WEIGHTS},
    Stage.SYNC: {Stage.RESUME_KV, Stage.PAUSE_WEIGHTS},
    Stage.RESUME_KV: {Stage.DRAIN, Stage.PAUSE_KV},
    Stage.DRAIN: {Stage.PAUSE_KV, Stage.RESUME_KV},
    Stage.PAUSE_KV: {Stage.PAUSE_WEIGHTS, Stage.RESUME_KV},
    Stage.PAUSE_WEIGHTS: {Stage.RESUME_WEIGHTS},
}


@pytest.mark.parametrize("after", ACCEPTED)
@pytest.mark.parametrize("stage", Stage)
def test_only_the_next_stage_and_the_undo_are_accepted(after: Stage | None, stage: Stage) -> None:
    if stage in ACCEPTED[after]:
        check_stage(stage, after=after, poison_reason=None)
        return
    with pytest.raises(StageOrder) as refused:
        check_stage(stage, after=after, poison_reason=None)
    assert refused.value.metadata["stage"] == stage
    assert refused.value.metadata["after"] == (after or START)
    assert set(refused.value.metadata["allowed"].split(", ")) == ACCEPTED[after]


@pytest.mark.parametrize(
    ("service", "stage", "tags", "refusal"),
    [
        ("rollout", "PAUSE_KV", ["WEIGHTS"], "tags[0]: stage PAUSE_KV moves kv_cache, not weights"),
        ("rollout", "PAUSE_KV", ["KV_CACHE", "CUDA_GRAPH"], "tags[1]: stage PAUSE_KV moves kv_cache, not cuda_graph"),
        ("rollout", "RESUME_KV", [], "stage: this call takes PAUSE_KV or PAUSE_WEIGHTS, not RESUME_KV"),
        ("rollout", "OFFLOAD", [], "stage: this call takes PAUSE_KV or PAUSE_WEIGHTS, not OFFLOAD"),
        ("trainer", "PAUSE_KV", [], "stage: this call takes OFFLOAD, not PAUSE_KV"),
        ("trainer", "UNSPECIFIED", [], "stage: this call takes OFFLOAD, not an unset stage"),
        ("trainer", 99, [], "stage: this call takes OFFLOAD, not the unknown stage 99"),
        ("trainer", "OFFLOAD", ["UNSPECIFIED"], "tags[0]: stage OFFLOAD moves weights, gradients, optimizer, not an unset tag"),
        ("trainer", "OFFLOAD", [99], "tags[0]: stage OFFLOAD moves weights, gradients, optimizer, not the unknown tag 99"),
    ],
)
def test_a_pause_is_refused_for_what_the_table_does_not_have(
    service: str, stage: str | int, tags: list[str | int], refusal: str
) -> None:
    named = [f"MEMORY_TAG_{tag}" if isinstance(tag, str) else tag for tag in tags]
    request = PauseRequest(stage=f"STAGE_{stage}" if isinstance(stage, str) else stage, tags=named)
    with pytest.raises(InvalidArgument, match=f"^{re.escape(refusal)}$"):
        decode_move(request, Service(service))


def test_a_stage_moves_what_it_names_or_only_counts() -> None:
    pause = PauseRequest(stage="STAGE_PAUSE_KV", tags=["MEMORY_TAG_KV_CACHE"])
    assert decode_move(pause, Service.ROLLOUT) == (Stage.PAUSE_KV, [MemoryTag.KV_CACHE])
    assert decode_move(ResumeRequest(stage="STAGE_LOAD_TRAINER"), Service.TRAINER) == (Stage.LOAD_TRAINER, [])


@pytest.mark.parametrize("after", [None, *RING])
def test_a_poisoned_engine_only_gives_memory_back(after: Stage | None) -> None:
    for stage in RING:
        if stage in (Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS):
            check_stage(stage, after=after, poison_reason="x")
        else:
            with pytest.raises(EnginePoisoned, match="x"):
                check_stage(stage, after=after, poison_reason="x")


@given(st.lists(st.tuples(st.sampled_from(RING), st.integers(0, 3)), max_size=30))
def test_whatever_is_asked_only_a_committed_version_generates_and_versions_never_fall(asked: list[tuple[Stage, int]]) -> None:
    async def run() -> None:
        rollout = service()
        received, served = None, []
        for stage, version in asked:
            try:
                await move(rollout, stage, version=version)
            except (StageOrder, VersionOrder):
                continue
            received = version if stage is Stage.SYNC else None if stage is Stage.PAUSE_WEIGHTS else received
            if stage is Stage.RESUME_KV:
                assert await samples(rollout) == [received]
                served.append(received)
            else:
                with pytest.raises((Asleep, Draining)):
                    await samples(rollout)
        assert served == sorted(served)

    asyncio.run(run())


async def test_a_failed_sync_poisons_and_its_version_is_never_served() -> None:
    rollout = service()
    rollout._sync.failure = WeightsCorrupt("flipped", tensors="a", rank=0)
    await move(rollout, Stage.RESUME_WEIGHTS)
    with pytest.raises(WeightsCorrupt):
        await move(rollout, Stage.SYNC)
    with pytest.raises(EnginePoisoned, match="SYNC failed: WeightsCorrupt: flipped"):
        await move(rollout, Stage.RESUME_KV)
    with pytest.raises(EnginePoisoned):
        await samples(rollout)
    await move(rollout, Stage.PAUSE_WEIGHTS)


async def test_what_one_rank_refuses_while_others_write_is_told_as_a_failure() -> None:
    rollout = service()
    rollout._sync.failure = BadHandle("engine rank 1: trainer rank 0 is gone", rank=1)
    await move(rollout, Stage.RESUME_WEIGHTS)
    with pytest.raises(InternalError, match="SYNC failed half-way, and the engine is restarted: engine rank 1: ") as caught:
        await move(rollout, Stage.SYNC)
    assert caught.value.metadata == {"rank": "1"}
    assert rollout.poison_reason is not None


async def test_a_drain_waits_for_samples_whose_tasks_have_not_begun() -> None:
    rollout = service()
    for stage in RING[:3]:
        await move(rollout, stage)
    stream = rollout.generate(REQUEST)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    drained = await rollout.drain(grace_s=1, timeout_s=1)
    assert (drained.num_finished, drained.num_cut) == (1, 0)
    assert [sample.policy_version for sample in await first] == [0]
    await stream.aclose()


async def test_a_drain_of_a_stuck_engine_ends_and_poisons() -> None:
    rollout = service()
    for stage in RING[:3]:
        await move(rollout, stage)
    rollout.engine.is_stuck = True
    stuck = asyncio.ensure_future(samples(rollout))
    await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded, match="did not release 1 requests"):
        await rollout.drain(grace_s=0, timeout_s=0.2)
    with pytest.raises(EnginePoisoned, match="DRAIN failed"):
        await samples(rollout)
    stuck.cancel()


async def test_a_resume_without_room_advances_nothing_and_may_be_tried_again() -> None:
    rollout = service()
    for stage in (Stage.RESUME_WEIGHTS, Stage.RESUME_KV):
        before = rollout.stage
        rollout.ranks.is_full = True
        with pytest.raises(OutOfGpuMemory):
            await move(rollout, stage)
        assert (rollout.stage, rollout.poison_reason) == (before, None)
        rollout.ranks.is_full = False
        await move(rollout, stage)
        if stage is Stage.RESUME_WEIGHTS:
            await move(rollout, Stage.SYNC)
    assert await samples(rollout) == [0]
