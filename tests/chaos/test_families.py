"""Every family's samples after a sync have the log-probs that transformers computes. Part of `make chaos`.

One engine per family starts on a CPU, in float32.
"""

from pathlib import Path

import pytest
import torch

from tasuki.trainer.backends.fsdp.model import correct_latent_norms
from tests.integration.rollout_process import (
    TestTrainer,
    connected,
    log_probs_of,
    start_rollout,
    stop_rollout,
    wait_until_serving,
)
from tests.models import CONFIGS, make_model, save_checkpoint

# SGLang's attention on a CPU does not cap logits, so rollout refuses to serve it there (tests/unit/test_rollout_model.py).
NEEDS_GPU = {"gemma2"}
# Far from the epsilon that transformers leaves in two norms of latent attention.
CHANGES = {"glm4_moe_lite": {"rms_norm_eps": 1e-2}}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in NEEDS_GPU])
async def test_a_family_generates_as_transformers_scores(kind: str, tmp_path: Path) -> None:
    changes = CHANGES.get(kind, {})
    folder = save_checkpoint(make_model(kind, seed=0, **changes), tmp_path / "model")
    rollout = start_rollout(tmp_path / "node", folder, 'rollout.dtype="float32"')
    try:
        wait_until_serving(rollout)
        prompts = [list(range(3, 20)), [40, 7], [90, 3, 3, 61, 8]]
        # The second version finds nothing that the engine has computed from the first.
        for version in (1, 2):
            model = make_model(kind, seed=version, **changes)
            correct_latent_norms(model)
            trainer = TestTrainer(rollout.socket_dir, f"trainer-{version}", model, dtype=torch.float32)
            turns = []
            async with connected(rollout) as client:
                await client.wake(trainer.publish(version))
                # The second turn continues the first, of which the engine has cached prefixes and states. The first one of the second
                # version continues samples of the first.
                for _ in range(2):
                    samples = await client.generate(prompts, num_samples=2, max_new_tokens=12, temperature=0.7, ignore_eos=True)
                    turns += [(prompts[sample.prompt_index], sample) for sample in samples]
                    prompts = [prompts[sample.prompt_index] + list(sample.token_ids) + [9] for sample in samples[:3]]
                await client.sleep()
            trainer.close()
            for prompt, sample in turns:
                theirs = log_probs_of(trainer.model, prompt, list(sample.token_ids), temperature=0.7)
                torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), theirs, rtol=0, atol=4e-5)
    finally:
        stop_rollout(rollout)
