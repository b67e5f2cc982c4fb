"""An engine in float32 on a CPU: its log-probs are those of transformers, so that every gap in bfloat16 is rounding."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.integration.rollout_process import (
    TestTrainer,
    connected,
    log_probs_of,
    start_rollout,
    stop_rollout,
    wait_until_serving,
)
from tests.models import make_model, save_checkpoint


async def test_log_probs_in_float32_are_exact(tmp_path: Path) -> None:
    model = make_model("qwen2_tied", seed=1)
    rollout = start_rollout(tmp_path / "node", save_checkpoint(model, tmp_path / "model"), "rollout.dtype=float32")
    try:
        wait_until_serving(rollout)
        trainer = TestTrainer(rollout.socket_dir, "trainer", model, dtype=torch.float32)
        async with connected(rollout) as client:
            await client.wake(trainer.publish(1))
            samples = await client.generate([[5, 6, 7]], num_samples=16, max_new_tokens=32, temperature=0.7, ignore_eos=True)
            await client.sleep()
        trainer.close()
    finally:
        stop_rollout(rollout)
    for sample in samples:
        theirs = log_probs_of(model, [5, 6, 7], list(sample.token_ids), temperature=0.7)
        assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=2e-5)
