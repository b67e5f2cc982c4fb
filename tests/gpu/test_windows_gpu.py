"""Windows of attention on a GPU: tokens drawn by SGLang's Triton kernels see as many tokens before them as in the trainer."""

from pathlib import Path

import numpy as np
import pytest

from tasuki.client import Client, Phase, SamplingParams, TrainingSample
from tasuki.config.load import load_config
from tasuki.node.start import start_node
from tests.gpu.node_settings import GPU
from tests.models import char_tokenizer, make_model, save_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPTS = np.random.default_rng(0).integers(3, 60, (64, 40)).tolist()


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_sampled_token_sees_as_much_as_a_prompts_last(family: str, tmp_path: Path) -> None:
    """The first token's log-prob comes from the prefill, the others' from decoding."""
    save_checkpoint(make_model(family, seed=0, head_dim=64), tmp_path / "model")
    char_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "node.toml").write_text('state_dir = "n"\nmodel.path = "model"\nrollout.engine.max_total_tokens = 4096\n')
    config = load_config(tmp_path / "node.toml", overrides=["trainer.num_ranks=1", *GPU])
    node = start_node(config)
    try:
        with Client(state_dir=config.state_dir, timeout_s=240) as client:
            client.acquire(Phase.ROLLOUT)
            samples = client.generate(PROMPTS, SamplingParams(max_new_tokens=40, ignore_eos=True))
            client.acquire(Phase.TRAIN)
            scored = client.compute_log_probs(
                [
                    TrainingSample(prompt_token_ids=PROMPTS[each.prompt_index], completion_token_ids=each.token_ids)
                    for each in samples
                ]
            )
    finally:
        node.stop()
    gaps = np.stack([np.abs(each.rollout_log_probs - its) for each, its in zip(samples, scored, strict=True)])
    assert gaps[:, 1:].mean() < 5 * gaps[:, 0].mean()  # 40 times as large where a token of the window is left out
