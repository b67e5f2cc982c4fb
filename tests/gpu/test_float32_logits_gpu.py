"""Float32 logits from bfloat16 weights on a GPU: the product, in a CUDA graph, and its effect on the gap between rollout and trainer.

The node needs `make native` and about two minutes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tasuki.client import Client, SamplingParams
from tasuki.client.types import TrainingSample
from tests.conftest import tasuki

START_S = 400
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(2 * START_S),
]


def test_the_product_is_not_rounded_also_in_a_graph() -> None:
    from tasuki.rollout.float32_logits import float32_product  # imports SGLang

    torch.manual_seed(0)
    hidden = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(32_000, 1024, device="cuda", dtype=torch.bfloat16)
    exact = hidden.double() @ weight.double().T
    float32_product(hidden, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = float32_product(hidden, weight)
    graph.replay()
    assert logits.dtype == torch.float32
    rounded = (hidden @ weight.T).double()
    assert (logits.double() - exact).abs().max() < 1e-3 < (rounded - exact).abs().max()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_float32_logits_bring_rollout_closer_to_the_trainer(
    tp_size: int, record_property: Callable[[str, object], None]
) -> None:
    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} GPUs")
    gaps = {is_float32: mean_gap(is_float32=is_float32, tp_size=tp_size) for is_float32 in (False, True)}
    record_property("mean_gap_bfloat16", gaps[False])
    record_property("mean_gap_float32", gaps[True])
    # The improvement depends on the model; this one has little to gain.
    assert gaps[True] < gaps[False]


def mean_gap(*, is_float32: bool, tp_size: int) -> float:
    """Mean of |rollout's - trainer's log-prob|, in nats per token; the trainer computes in float32, so the error is rollout's."""
    from tests.models import make_model, save_checkpoint

    # Not pytest's own folder: the path of a unix socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="tasuki-"))
    sizes = {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 512}
    model = save_checkpoint(make_model("qwen2", seed=0, **sizes), folder / "model")
    config = folder / "node.toml"
    config.write_text(
        f"""
        state_dir = "{folder / "node"}"
        device = "cuda"
        [model]
        path = "{model}"
        [trainer]
        num_ranks = {tp_size}
        compute_dtype = "float32"
        [rollout]
        tp_size = {tp_size}
        float32_logits = {str(is_float32).lower()}
        attention_backend = "triton"
        sampling_backend = "pytorch"
        kv_tokens = 65536
        """
    )
    try:
        started = tasuki("up", config, timeout_s=START_S)
        assert started.returncode == 0, started.stderr
        with Client(state_dir=folder / "node") as client:
            sampling = SamplingParams(max_new_tokens=128, ignore_eos=True)
            prompts = [[token, token + 1, token + 2] for token in range(3, 67)]
            samples = client.generate(prompts, sampling)
            scored = client.compute_log_probs(
                [
                    TrainingSample(prompt_token_ids=prompts[sample.prompt_index], completion_token_ids=sample.token_ids)
                    for sample in samples
                ]
            )
        gaps = [np.abs(sample.rollout_log_probs - theirs) for sample, theirs in zip(samples, scored, strict=True)]
        return float(np.concatenate(gaps).mean())
    finally:
        tasuki("down", config, timeout_s=60)
        shutil.rmtree(folder)
