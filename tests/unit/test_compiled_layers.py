"""Layers compiled by torch: results, and how often micro-batches of other shapes have them compiled again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tasuki.planner.layout import Checkpointing
from tasuki.trainer.backends.fsdp.compiled_layers import compile_layers
from tests.models import make_model
from tests.unit.test_packed_attention import LENGTHS, pack, policy_of

NUM_STEPS = 50


@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_fifty_packs_of_other_lengths_compile_nothing_again(checkpointing: Checkpointing) -> None:
    torch._dynamo.reset()
    causal_lm = make_model("llama", seed=5)
    plain, compiled = (policy_of(causal_lm, checkpointing=checkpointing) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compile_layers(compiled.causal_lm, backend=counter)
    generator = np.random.default_rng(0)
    counts: list[int] = []
    for step in range(NUM_STEPS):
        lengths = tuple(generator.integers(1, 60, size=generator.integers(1, 7)).tolist()) if step else LENGTHS
        batch = pack(lengths, seed=step)
        scores = [policy(batch)[0] for policy in (plain, compiled)]
        torch.testing.assert_close(scores[1], scores[0], rtol=1e-5, atol=1e-5)
        for score_N in scores:
            score_N.sum().backward()
        counts.append(counter.frame_count)
    assert counts[-1] == counts[2], counts
    exact = {name: param.grad for name, param in plain.causal_lm.named_parameters()}
    for name, param in compiled.causal_lm.named_parameters():
        assert (param.grad - exact[name]).norm() <= 1e-5 * max(1.0, exact[name].norm()), name
