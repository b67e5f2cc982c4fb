"""The rollout service from outside, through real gRPC, on a real engine."""

from __future__ import annotations

from tasuki.v1 import types_pb2
from tests.integration.conftest import RolloutClient, TestTrainer


async def test_generates_after_a_sync(rollout: RolloutClient, trainer: TestTrainer) -> None:
    received = await rollout.wake(trainer.publish(0))
    samples = await rollout.generate([[5, 6, 7], [8, 9]], num_samples=3, max_new_tokens=6, temperature=1.0, ignore_eos=True)
    print({timing.name: timing.seconds for timing in received.timings}, received.copied_bytes)
    assert sorted((sample.prompt_index, sample.sample_index) for sample in samples) == [
        (p, s) for p in range(2) for s in range(3)
    ]
    assert all(len(sample.token_ids) == len(sample.rollout_log_probs) == 6 for sample in samples)
    assert {sample.policy_version for sample in samples} == {0}
    assert {sample.finish_reason for sample in samples} == {types_pb2.FINISH_REASON_LENGTH}
