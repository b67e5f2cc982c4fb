"""The rollout service from outside, through real gRPC, on a real engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.v1 import memory_pb2, rollout_pb2, types_pb2, weights_pb2
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import (
    Asleep,
    BadHandle,
    Busy,
    Draining,
    InvalidArgument,
    StageOrder,
    StaleEpoch,
    TasukiError,
    VersionOrder,
    from_rpc_error,
)
from tests.integration.conftest import RolloutClient, RolloutProcess, TestTrainer, generate_request
from tests.models import EOS, VOCAB_SIZE

CONTEXT_LENGTH = 256
WEIGHTS, KV = types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE


async def refused(call: Awaitable[object]) -> TasukiError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def log_probs_of(model: torch.nn.Module, prompt: list[int], completion: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each completion token by transformers, in float32."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)


async def until_idle(rollout: RolloutClient) -> int:
    for _ in range(100):
        if (await rollout.state()).num_running == 0:
            return 0
        await asyncio.sleep(0.05)
    return (await rollout.state()).num_running


# --- generation


async def test_samples_come_with_their_version_and_log_probs(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(0))
    prompts = [[5, 6, 7], [8, 9]]
    samples = await rollout.generate(prompts, num_samples=3, max_new_tokens=6, temperature=0.7, ignore_eos=True)
    assert sorted((s.prompt_index, s.sample_index) for s in samples) == [(p, i) for p in range(2) for i in range(3)]
    assert {(s.policy_version, s.finish_reason, len(s.token_ids)) for s in samples} == {(0, types_pb2.FINISH_REASON_LENGTH, 6)}
    for sample in samples:
        theirs = log_probs_of(trainer.model, prompts[sample.prompt_index], list(sample.token_ids), temperature=0.7)
        # The engine computes in bfloat16, the reference in float32.
        assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=0.1)


async def test_a_later_version_is_what_generates_even_with_a_known_prompt(rollout: RolloutClient, trainer: TestTrainer) -> None:
    """A prefix cached under the first version would give log-probs of neither."""
    prompt = list(range(3, 60))
    await rollout.wake(trainer.publish(1))
    await rollout.generate([prompt], max_new_tokens=4, ignore_eos=True)
    await rollout.sleep()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1).add_(0.01)
    await rollout.wake(trainer.publish(2))
    (sample,) = await rollout.generate([prompt], max_new_tokens=4, ignore_eos=True)
    assert sample.policy_version == 2
    theirs = log_probs_of(trainer.model, prompt, list(sample.token_ids))
    assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=0.15)


async def test_seeds_repeat_samples(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(2))

    async def tokens(seed: int | None, num_samples: int = 1) -> dict[int, list[int]]:
        given = {} if seed is None else {"sampling_seed": seed}
        samples = await rollout.generate([[5, 6]], num_samples=num_samples, max_new_tokens=12, ignore_eos=True, **given)
        return {sample.sample_index: list(sample.token_ids) for sample in samples}

    four = await tokens(100, num_samples=4)
    assert await tokens(100, num_samples=4) == four
    assert (await tokens(102))[0] == four[2]
    assert len({tuple(sample) for sample in four.values()}) == 4
    assert await tokens(None) != await tokens(None)


async def test_stop_tokens_end_a_sample_and_are_its_last_token(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(2))
    (free,) = await rollout.generate([[5, 6]], max_new_tokens=8, temperature=0.0, ignore_eos=True)
    stop = free.token_ids[3]
    first = list(free.token_ids).index(stop)
    (stopped,) = await rollout.generate([[5, 6]], max_new_tokens=8, temperature=0.0, stop_token_ids=[stop])
    assert (list(stopped.token_ids), stopped.finish_reason) == (list(free.token_ids[: first + 1]), types_pb2.FINISH_REASON_STOP)
    assert len(stopped.rollout_log_probs) == first + 1


async def test_min_new_tokens_holds_the_end_back(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(2))
    samples = await rollout.generate(
        [[5]], num_samples=64, max_new_tokens=20, min_new_tokens=15, temperature=2.0, stop_token_ids=[7, 8, 9]
    )
    assert min(len(sample.token_ids) for sample in samples) >= 15
    assert not any({EOS, 7, 8, 9} & set(sample.token_ids[:15]) for sample in samples)


async def test_prompt_and_completion_may_fill_the_context_to_the_last_token(
    rollout: RolloutClient, trainer: TestTrainer
) -> None:
    await rollout.wake(trainer.publish(2))
    for length in (CONTEXT_LENGTH - 1, CONTEXT_LENGTH - 5):
        (sample,) = await rollout.generate([[5] * length], max_new_tokens=CONTEXT_LENGTH - length, ignore_eos=True)
        assert len(sample.token_ids) == CONTEXT_LENGTH - length
    (unasked,) = await rollout.generate([[5] * (CONTEXT_LENGTH - 3)], ignore_eos=True)
    assert len(unasked.token_ids) == 3


@pytest.mark.parametrize(
    ("prompts", "arguments", "field"),
    [
        ([], {}, "prompts"),
        ([[]], {}, "prompts[0].token_ids"),
        ([[5], [5, -1]], {}, "prompts[1].token_ids[1]"),
        ([[VOCAB_SIZE]], {}, "prompts[0].token_ids[0]"),
        ([[5]], {"num_samples": 0}, "num_samples"),
        ([[5]] * 2, {"num_samples": 40_000}, "num_samples"),
        ([[5] * CONTEXT_LENGTH], {}, "prompts[0].token_ids"),
        ([[5] * 200], {"max_new_tokens": 57}, "sampling_params.max_new_tokens"),
        ([[5]], {"max_new_tokens": 0}, "sampling_params.max_new_tokens"),
        ([[5]], {"temperature": -0.1}, "sampling_params.temperature"),
        ([[5]], {"temperature": float("nan")}, "sampling_params.temperature"),
        ([[5]], {"temperature": float("inf")}, "sampling_params.temperature"),
        ([[5]], {"top_p": 0.0}, "sampling_params.top_p"),
        ([[5]], {"top_p": 1.5}, "sampling_params.top_p"),
        ([[5]], {"top_p": float("nan")}, "sampling_params.top_p"),
        ([[5]], {"top_k": 0}, "sampling_params.top_k"),
        ([[5]], {"min_p": 2.0}, "sampling_params.min_p"),
        ([[5]], {"min_p": 0.5}, "sampling_params.min_p"),
        ([[5]], {"repetition_penalty": 0.0}, "sampling_params.repetition_penalty"),
        ([[5]], {"frequency_penalty": 3.0}, "sampling_params.frequency_penalty"),
        ([[5]], {"min_new_tokens": 9, "max_new_tokens": 8}, "sampling_params.min_new_tokens"),
        ([[5]], {"stop_token_ids": [1, VOCAB_SIZE]}, "sampling_params.stop_token_ids[1]"),
    ],
)
async def test_bad_requests_name_the_field(
    rollout: RolloutClient, prompts: list[list[int]], arguments: dict[str, object], field: str
) -> None:
    error = await refused(rollout.generate(prompts, **arguments))
    assert isinstance(error, InvalidArgument)
    assert error.metadata["field"] == field


@asynccontextmanager
async def long_call(rollout: RolloutClient, *, num_samples: int) -> AsyncIterator[asyncio.Task[list[types_pb2.Sample]]]:
    """Samples that run until they are cut, running already."""
    task = asyncio.ensure_future(rollout.generate([[5, 6]], num_samples=num_samples, max_new_tokens=250, ignore_eos=True))
    while (await rollout.state()).num_running < num_samples:
        assert not task.done(), task.result()
        await asyncio.sleep(0.01)
    yield task


async def test_cancelling_a_call_takes_its_requests_out_of_the_engine(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(2))
    call = rollout.rollout.Generate(generate_request([[5, 6]], num_samples=24, max_new_tokens=250, ignore_eos=True), timeout=60)
    while (await rollout.state()).num_running < 24:
        await asyncio.sleep(0.01)
    call.cancel()
    assert await until_idle(rollout) == 0
    assert len(await rollout.generate([[5]], max_new_tokens=2, ignore_eos=True)) == 1


async def test_a_deadline_takes_requests_out_of_the_engine(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(2))
    request = generate_request([[5, 6]], num_samples=24, max_new_tokens=250, ignore_eos=True)
    with pytest.raises(grpc.RpcError) as caught:
        _ = [answer async for answer in rollout.rollout.Generate(request, timeout=0.2)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await until_idle(rollout) == 0


# --- drain


async def test_drain_cuts_and_returns_what_there_is(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(2))
    async with long_call(rollout, num_samples=8) as running:
        await asyncio.sleep(0.3)
        drained = await rollout.drain(grace_ms=0)
        samples = await running
    assert (drained.num_finished, drained.num_cut) == (0, 8)
    assert {sample.finish_reason for sample in samples} == {types_pb2.FINISH_REASON_CUT}
    assert all(len(sample.token_ids) == len(sample.rollout_log_probs) for sample in samples)
    assert any(sample.token_ids for sample in samples)
    for sample in samples:
        theirs = log_probs_of(trainer.model, [5, 6], list(sample.token_ids)) if sample.token_ids else torch.empty(0)
        assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=0.15)


async def generate_health(rollout_process: RolloutProcess) -> int:
    async with open_channel(rollout_process.target) as channel:
        request = health_pb2.HealthCheckRequest(service="tasuki.v1.RolloutService/Generate")
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)).status


async def test_drain_lets_short_samples_finish_and_takes_no_new_ones(
    rollout: RolloutClient, rollout_process: RolloutProcess, trainer: TestTrainer
) -> None:
    await rollout.wake(trainer.publish(2))
    async with long_call(rollout, num_samples=2) as running:
        draining = asyncio.ensure_future(rollout.drain(grace_ms=50_000))
        while await generate_health(rollout_process) != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.01)
        assert isinstance(await refused(rollout.generate([[5]], max_new_tokens=1)), Draining)
        assert (await rollout.state()).stage == types_pb2.STAGE_RESUME_KV
        samples = await running
        drained = await draining
    assert (drained.num_finished, drained.num_cut) == (2, 0)
    assert {len(sample.token_ids) for sample in samples} == {250}


async def test_memory_of_running_requests_is_not_taken(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(2))
    async with long_call(rollout, num_samples=4) as running:
        assert isinstance(await refused(rollout.pause(types_pb2.STAGE_PAUSE_KV, KV)), Busy)
        assert (await rollout.state()).stage == types_pb2.STAGE_RESUME_KV
        await rollout.drain()
        await running


async def test_a_drained_service_can_be_opened_again(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.wake(trainer.publish(2))
    await rollout.drain()
    await rollout.resume(types_pb2.STAGE_RESUME_KV, KV)
    await rollout.drain()
    await rollout.pause(types_pb2.STAGE_PAUSE_KV, KV)
    await rollout.resume(types_pb2.STAGE_RESUME_KV, KV)
    (sample,) = await rollout.generate([[5]], max_new_tokens=2, ignore_eos=True)
    assert sample.policy_version == 2


# --- stages


async def test_asleep_it_refuses_to_generate_and_says_where_it_stands(rollout: RolloutClient, rollout_model: Path) -> None:
    assert isinstance(await refused(rollout.generate([[5]])), Asleep)
    state = await rollout.state()
    assert not state.HasField("policy_version")
    assert not state.HasField("received_version")
    assert list(state.resident_tags) == []
    assert (state.tp_size, state.context_length, state.vocab_size) == (1, CONTEXT_LENGTH, VOCAB_SIZE)
    assert (state.model_path, state.is_poisoned, state.num_running) == (str(rollout_model), False, 0)


async def test_a_received_version_is_not_served_before_it_is_committed(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    received = await rollout.receive(trainer.publish(3))
    assert {timing.name for timing in received.timings} == {"import", "record", "copy", "verify", "ranks", "compare"}
    assert (received.policy_version, list(received.fallback_names)) == (3, [])
    assert isinstance(await refused(rollout.generate([[5]])), Asleep)
    state = await rollout.state()
    assert (state.received_version, state.HasField("policy_version"), list(state.resident_tags)) == (3, False, [WEIGHTS])
    await rollout.resume(types_pb2.STAGE_RESUME_KV, KV)
    state = await rollout.state()
    assert (state.policy_version, state.HasField("received_version"), list(state.resident_tags)) == (3, False, [WEIGHTS, KV])


async def test_stages_out_of_order_are_refused_and_change_nothing(rollout: RolloutClient, trainer: TestTrainer) -> None:
    weights = trainer.publish(3)
    for call in (
        rollout.receive(weights),
        rollout.drain(),
        rollout.resume(types_pb2.STAGE_RESUME_KV, KV),
        rollout.pause(types_pb2.STAGE_PAUSE_KV, KV),
    ):
        assert isinstance(await refused(call), StageOrder)
    await rollout.wake(weights)
    for call in (
        rollout.receive(weights),
        rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS),
        rollout.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS),
    ):
        error = await refused(call)
        assert isinstance(error, StageOrder)
        assert (error.metadata["after"], error.metadata["allowed"]) == ("resume_kv", "drain, pause_kv")
    assert len(await rollout.generate([[5]], max_new_tokens=1)) == 1


async def test_each_stage_of_waking_can_be_undone(rollout: RolloutClient, trainer: TestTrainer) -> None:
    weights = trainer.publish(3)
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    await rollout.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    await rollout.receive(weights)
    await rollout.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
    assert not (await rollout.state()).HasField("received_version")
    await rollout.wake(weights)
    await rollout.pause(types_pb2.STAGE_PAUSE_KV, KV)
    await rollout.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
    assert isinstance(await refused(rollout.generate([[5]])), Asleep)


async def test_stages_and_tags_that_are_not_rollouts_are_refused(rollout: RolloutClient) -> None:
    for call, field in (
        (rollout.pause(types_pb2.STAGE_OFFLOAD), "stage"),
        (rollout.resume(types_pb2.STAGE_PAUSE_KV), "stage"),
        (rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, types_pb2.MEMORY_TAG_OPTIMIZER), "tags[0]"),
        (rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS, KV), "tags[1]"),
    ):
        error = await refused(call)
        assert isinstance(error, InvalidArgument)
        assert error.metadata["field"] == field


async def test_refused_weights_leave_the_engine_as_it_was(rollout: RolloutClient, trainer: TestTrainer) -> None:
    weights = trainer.publish(5)
    await rollout.wake(weights)
    await rollout.sleep()
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    elsewhere = weights_pb2.PublishedWeights.FromString(weights.SerializeToString())
    elsewhere.handles[0].socket_path = "/tmp/elsewhere.sock"
    missing = weights_pb2.PublishedWeights.FromString(weights.SerializeToString())
    missing.boot_id, missing.handles[0].socket_path = "other", weights.handles[0].socket_path + ".gone"
    for bad, kind in (
        (elsewhere, BadHandle),
        (missing, BadHandle),
        (trainer.handles(6), VersionOrder),
        (trainer.handles(4), VersionOrder),
    ):
        assert isinstance(await refused(rollout.receive(bad)), kind)
    state = await rollout.state()
    assert (state.is_poisoned, state.stage) == (False, types_pb2.STAGE_RESUME_WEIGHTS)
    assert (await rollout.receive(weights)).policy_version == 5


async def test_a_repeated_command_gets_the_first_answer(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    request = rollout_pb2.ReceiveWeightsRequest(command=rollout.command(), weights=trainer.publish(5))
    first = await rollout.rollout.ReceiveWeights(request, timeout=60)
    assert await rollout.rollout.ReceiveWeights(request, timeout=60) == first


async def test_commands_of_an_older_coordinator_are_refused(rollout: RolloutClient) -> None:
    command = types_pb2.CommandId(epoch=0, sequence=1, request_id="old")
    request = memory_pb2.ResumeRequest(command=command, stage=types_pb2.STAGE_RESUME_WEIGHTS)
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    assert isinstance(await refused(rollout.memory.Resume(request, timeout=60)), StaleEpoch)


# --- what others see


async def test_health_tells_whether_it_generates(
    rollout: RolloutClient, rollout_process: RolloutProcess, trainer: TestTrainer
) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert await generate_health(rollout_process) == not_serving
    await rollout.wake(trainer.publish(5))
    assert await generate_health(rollout_process) == serving
    await rollout.drain()
    assert await generate_health(rollout_process) == not_serving


async def test_an_idle_engine_takes_no_core(
    rollout: RolloutClient, rollout_process: RolloutProcess, trainer: TestTrainer
) -> None:
    await rollout.wake(trainer.publish(5))
    front = psutil.Process(rollout_process.process.pid)
    processes = [front, *front.children(recursive=True)]

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before, started = cpu_seconds(), time.monotonic()
    await asyncio.sleep(3)
    share = (cpu_seconds() - before) / (time.monotonic() - started)
    assert share < 0.1, f"{share:.0%} of a core over {len(processes)} processes"


async def test_nothing_lies_outside_the_private_folder(rollout_process: RolloutProcess) -> None:
    folder = rollout_process.socket_dir
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    sockets = [path for path in folder.iterdir() if path.is_socket()]
    assert {oct(path.stat().st_mode & 0o077) for path in sockets} == {"0o0"}
    pids = {
        rollout_process.process.pid,
        *(child.pid for child in psutil.Process(rollout_process.process.pid).children(recursive=True)),
    }
    theirs = [line for line in Path("/proc/net/unix").read_text().splitlines() if "/tmp/" in line and str(folder) not in line]
    opened = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in pids for fd in os.listdir(f"/proc/{pid}/fd")}
    inodes = {f"socket:[{line.split()[6]}]" for line in theirs}
    assert not inodes & opened
