"""The engine's memory from outside: figures of the system for the rank's process, of the service, and an engine that still works."""

import asyncio
import os
import signal
from pathlib import Path

import psutil

from tasuki.v1 import memory_pb2, types_pb2
from tasuki.wire.errors import DeadlineExceeded
from tests.integration.conftest import KV_CACHE_TOKENS
from tests.integration.rollout_process import RolloutClient, RolloutProcess, TestTrainer, start_samples
from tests.integration.test_rollout import refused
from tests.pulses import engine_rank_pids

WEIGHTS, KV = types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE
GIB = 1 << 30


class Rank:
    """The engine rank's process, from the system's figures."""

    def __init__(self, rollout: RolloutProcess) -> None:
        (pid,) = engine_rank_pids(rollout.state_dir)
        self.process = psutil.Process(pid)

    def resident_bytes(self) -> int:
        return self.process.memory_info().rss

    def mapped(self) -> set[tuple[int, int]]:
        """First and last address of every mapped range of an arena."""
        lines = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in lines if "/memfd:tasuki" in line and " rw-s " in line]
        return {(int(start, 16), int(end, 16)) for start, end in ranges}

    def touch(self) -> None:
        """Makes every mapped page resident in the process, as if it had been used."""
        with open(f"/proc/{self.process.pid}/mem", "rb", buffering=0) as memory:
            for start, end in self.mapped():
                memory.seek(start)
                left = end - start
                while left:
                    left -= len(memory.read(min(left, 1 << 24)))


async def usage_of(rollout: RolloutClient, *, timeout_s: float = 10) -> memory_pb2.GetUsageResponse:
    return await rollout.memory.GetUsage(memory_pb2.GetUsageRequest(), timeout=timeout_s)


async def test_sleep_gives_the_pages_back_and_waking_takes_them_at_the_same_addresses(
    rollout: RolloutClient, rollout_process: RolloutProcess, trainer: TestTrainer
) -> None:
    rank = Rank(rollout_process)
    asleep_before = rank.mapped()
    await rollout.wake(trainer.publish(7))
    first = await rollout.generate([[5, 6, 7]], max_new_tokens=30, temperature=0.0, ignore_eos=True)
    rank.touch()
    mapped, awake = rank.mapped(), rank.resident_bytes()
    tag_bytes = sum(tag.total_bytes for tag in (await usage_of(rollout)).tags)
    assert tag_bytes >= GIB
    assert sum(end - start for start, end in mapped) == tag_bytes

    await rollout.drain()
    released = (await rollout.pause(types_pb2.STAGE_PAUSE_KV, KV)).released_bytes
    released += (await rollout.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)).released_bytes
    assert released == tag_bytes
    assert awake - rank.resident_bytes() >= 0.95 * tag_bytes
    assert asleep_before == rank.mapped() == set()

    await rollout.wake(trainer.publish(7))
    rank.touch()
    assert rank.mapped() == mapped
    assert rank.resident_bytes() >= awake - 0.05 * tag_bytes
    assert await rollout.generate([[5, 6, 7]], max_new_tokens=30, temperature=0.0, ignore_eos=True) == first


async def test_usage_is_told_by_the_ranks_in_every_state(rollout: RolloutClient, trainer: TestTrainer) -> None:
    async def mapped() -> dict[int, tuple[int, bool]]:
        usage = await usage_of(rollout)
        assert all((tag.device, tag.rank) == ("cpu", 0) for tag in usage.tags)
        return {tag.tag: (tag.mapped_bytes, tag.is_paused) for tag in usage.tags}

    assert await mapped() == {WEIGHTS: (0, True), KV: (0, True)}
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    totals = {tag.tag: tag.total_bytes for tag in (await usage_of(rollout)).tags}
    assert totals[WEIGHTS] >= sum(parameter.numel() * 2 for parameter in trainer.model.parameters())
    assert totals[KV] >= KV_CACHE_TOKENS * 2 * 2 * 2 * 16 * 2
    assert await mapped() == {WEIGHTS: (totals[WEIGHTS], False), KV: (0, True)}
    await rollout.receive(trainer.publish(7))
    await rollout.resume(types_pb2.STAGE_RESUME_KV, KV)
    running = await start_samples(rollout, num_samples=4, max_new_tokens=200)
    assert await mapped() == {WEIGHTS: (totals[WEIGHTS], False), KV: (totals[KV], False)}
    assert not running.done()
    draining = asyncio.ensure_future(rollout.drain(grace_ms=50_000))
    assert await mapped() == {WEIGHTS: (totals[WEIGHTS], False), KV: (totals[KV], False)}
    await draining
    assert len(await running) == 4


async def test_usage_of_a_rank_that_does_not_answer_ends_in_time_and_comes_back(
    rollout: RolloutClient, rollout_process: RolloutProcess
) -> None:
    rank = Rank(rollout_process).process
    os.kill(rank.pid, signal.SIGSTOP)
    try:
        error = await refused(usage_of(rollout, timeout_s=4))
        assert isinstance(error, DeadlineExceeded)
        assert "not every engine rank answered" in error.message
    finally:
        os.kill(rank.pid, signal.SIGCONT)
    assert len((await usage_of(rollout)).tags) == 2


async def test_usage_is_watched_at_the_asked_interval(rollout: RolloutClient) -> None:
    call = rollout.memory.WatchUsage(memory_pb2.WatchUsageRequest(interval_ms=50))
    answers = []
    async for answer in call:
        answers.append(answer)
        if len(answers) == 2:
            await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
        if len(answers) == 5:
            break
    call.cancel()
    times = [answer.time.ToMilliseconds() for answer in answers]
    # Each answer is dated when it was read, which takes a while, too.
    assert times == sorted(times) and times[-1] - times[0] >= 4 * 50 * 0.75
    weights = [next(tag for tag in answer.usage.tags if tag.tag == WEIGHTS).is_paused for answer in answers]
    assert (weights[0], weights[-1]) == (True, False)
    assert all(len(answer.usage.devices) == 1 for answer in answers)
