"""Calls of the largest allowed size: rollout survives them, answers others meanwhile, and cancels abandoned ones."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tasuki.config.paths import pulse_dir
from tasuki.rpc.heartbeat import read_pulse
from tests.integration.rollout_process import RolloutClient, RolloutProcess, TestTrainer, generate_request
from tests.limits import limit_s

MOST = 65_536
PROMPTS = [[5, 6]] * 1024
CALL_S = 600.0


@dataclass
class Gap:
    """Longest time between two beats of rollout's pulse."""

    longest_s: float = 0.0


@asynccontextmanager
async def watched(process: RolloutProcess) -> AsyncIterator[Gap]:
    (path,) = pulse_dir(process.state_dir).glob("rollout-*")
    gap = Gap()

    async def watch() -> None:
        pulse, beat_at = None, time.monotonic()
        while True:
            if (now := read_pulse(path)) != pulse:
                pulse, beat_at = now, time.monotonic()
            gap.longest_s = max(gap.longest_s, time.monotonic() - beat_at)
            await asyncio.sleep(0.02)

    task = asyncio.ensure_future(watch())
    try:
        yield gap
    finally:
        task.cancel()


async def test_the_greatest_call_stops_neither_the_pulse_nor_others_and_is_given_up_at_once(
    rollout: RolloutClient, rollout_process: RolloutProcess, trainer: TestTrainer
) -> None:
    await rollout.wake(trainer.publish(6))
    async with watched(rollout_process) as gap:
        request = generate_request(PROMPTS, num_samples=MOST // len(PROMPTS), max_new_tokens=2, ignore_eos=True)
        call = rollout.rollout.Generate(request, timeout=CALL_S)
        first = await call.read()
        assert first.samples
        (small,) = await rollout.generate([[7]], max_new_tokens=1)
        assert (await rollout.state()).num_running > MOST / 2
        call.cancel()
        drained = await rollout.drain(grace_ms=50_000)
    assert gap.longest_s < limit_s(1.5)
    assert small.token_ids
    # DRAIN did not finish the cancelled call: within the grace period all of it would have ended.
    assert drained.num_finished < MOST / 4
    await rollout.sleep()
    await rollout.wake(trainer.publish(6))
    (after,) = await rollout.generate([[5]], max_new_tokens=1)
    assert (after.policy_version, (await rollout.state()).is_poisoned) == (6, False)
