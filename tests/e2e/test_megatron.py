"""A whole node whose trainer is megatron-core with two tensor-parallel ranks."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasuki.client import Client, Phase, SamplingParams, TrainingSample
from tests.conftest import RunningNode, started_node

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")

OVERRIDES = ("trainer.backend=megatron", "trainer.megatron.tensor_parallel=2", "trainer.learning_rate=0.001")


@pytest.fixture(scope="module")
def split() -> Iterator[RunningNode]:
    with started_node(overrides=OVERRIDES, vocab_size=132) as node:
        yield node


def test_a_node_generates_trains_syncs_and_exports(split: RunningNode, tmp_path: Path) -> None:
    gaps: list[float] = []
    with Client(state_dir=split.state_dir) as client:
        for _ in range(3):
            client.acquire(Phase.ROLLOUT)
            samples = client.generate([[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=8), num_samples=2)
            trained = [TrainingSample.of(one, advantages=1.0) for one in samples]
            scored = client.compute_log_probs(trained)
            gaps += [float(abs(one.rollout_log_probs - other).max()) for one, other in zip(samples, scored, strict=True)]
            client.forward_backward(trained)
            assert client.optim_step().grad_norm > 0
        client.export_model(tmp_path / "model")
    # Rollout computes in bfloat16; a sync of other weights would be off by whole nats.
    assert max(gaps) < 0.1
    before, after = (load_file(folder / "model.safetensors") for folder in (split.model, tmp_path / "model"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
