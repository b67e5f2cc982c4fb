"""Samples that share a prompt against separate samples: attention by its formula, and every family with its gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasuki.models.family import full_attention
from tasuki.planner.node import Checkpointing
from tasuki.planner.presets import MODELS
from tasuki.trainer.attention import blocks as attention_blocks
from tasuki.trainer.attention import packed as attention
from tasuki.trainer.attention import padded as attention_padded
from tasuki.trainer.attention.blocks import OwnBlocks, PromptBlocks
from tasuki.trainer.attention.packed import sequences_of
from tasuki.trainer.attention.trial import fault_with_shared_prompts
from tasuki.trainer.backends.fsdp.lora.adapters import trained_parameters
from tasuki.trainer.data.micro_batch import SequencePart, token_batch
from tasuki.trainer.data.samples import NO_PREFIX, Samples
from tasuki.trainer.wire import decode_parts, encode_parts
from tasuki.v1.ranks_pb2 import SampleColumns
from tests.extent import crossed, examples
from tests.models import CONFIGS, HYBRID, VOCAB_SIZE, make_model
from tests.unit.test_packed_attention import RUNGS, policy_of

CPU = torch.device("cpu")
GROUPS = ((9, (4, 1, 30, 4)), (2, (70, 3)), (5, (8,)), (12, (1, 1)))
"""Prompts above and below the windows of tests.models; one single sample, and a prompt without completions."""


def make_samples(groups: tuple[tuple[int, tuple[int, ...]], ...], *, seed: int = 0) -> Samples:
    """Makes samples of groups, given their prompt tokens and the completion tokens of each sample; the groups alternate."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(VOCAB_SIZE, size=length) for length, _ in groups]
    rows = [(turn, group, num) for group, (_, lengths) in enumerate(groups) for turn, num in enumerate(lengths)]
    rows.sort()
    completions = [generator.integers(VOCAB_SIZE, size=num) for _, _, num in rows]
    tokens = [part for (_, group, _), own in zip(rows, completions, strict=True) for part in (prompts[group], own)]
    num_tokens, num_completion_S = sum(map(len, completions)), np.array([num for _, _, num in rows])
    temperature_S = generator.uniform(0.5, 2.0, len(rows)).astype(np.float32)
    return Samples(
        num_prompt_S=np.array([len(prompts[group]) for _, group, _ in rows]),
        num_completion_S=num_completion_S,
        policy_version_S=np.zeros(len(rows), dtype=np.uint64),
        token_ids_T=np.concatenate(tokens).astype(np.int32),
        columns={"loss_mask": np.ones(num_tokens, dtype=np.float32), "temperature": np.repeat(temperature_S, num_completion_S)},
        prefix_S=np.array([group if len(groups[group][1]) > 1 else NO_PREFIX for _, group, _ in rows], dtype=np.int32),
    )


def unshared(samples: Samples) -> Samples:
    return replace(samples, prefix_S=None)


def test_a_prompt_is_there_once_and_its_continuations_count_on() -> None:
    samples = make_samples(((3, (2, 3)), (2, (2,))))
    batch, plain = token_batch(samples, device=CPU), token_batch(unshared(samples), device=CPU)
    # The single sample, the prompt, and its completions.
    assert batch.cu_seqlens_S.tolist() == [0, 3, 6, 7, 9]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 3, 4]
    assert batch.prompts is not None
    assert (batch.prompts.first, batch.prompts.num_prefix, batch.prompts.num_suffix) == (3, (3,), (3,))
    assert len(plain.input_ids_T) == 12
    # The first tokens of both samples are predicted at the end of the prompt.
    assert batch.order_N is not None
    assert batch.places_N[batch.order_N].tolist() == [5, 6, 1, 2, 5, 7, 8]
    assert torch.equal(batch.token_ids_N[batch.order_N], plain.token_ids_N)
    assert torch.equal(batch.temperature_N[batch.order_N], plain.temperature_N)


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_of_the_tokens_make_up_the_whole(num_parts: int) -> None:
    samples = make_samples(GROUPS)
    whole = token_batch(samples, device=CPU)
    parts = [token_batch(samples, device=CPU, part=SequencePart(index, num_parts)) for index in range(num_parts)]
    tokens = torch.cat([part.input_ids_T for part in parts])
    assert torch.equal(tokens[: len(whole.input_ids_T)], whole.input_ids_T)
    width = len(parts[0].input_ids_T)
    places = torch.cat([part.places_N + index * width for index, part in enumerate(parts)])
    assert torch.equal(places, whole.places_N)
    assert torch.equal(torch.cat([part.token_ids_N for part in parts]), whole.token_ids_N)
    assert all(torch.equal(part.order_N, whole.order_N) for part in parts)


def attended(samples: Samples, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, softcap: float | None) -> Tensor:
    """Attention output [N, H, D] at predicting positions; queries, keys and values depend only on a token and its position."""
    batch = token_batch(samples, device=CPU)
    rows = batch.input_ids_T * 512 + batch.position_ids_T
    sequences = sequences_of("sdpa", batch)
    out = sequences.attend(*(x[rows % len(x)] for x in (q, k, v)), scale=0.3, window=window, softcap=softcap)
    places = batch.places_N if batch.order_N is None else batch.places_N[batch.order_N]
    return out[places]


@pytest.mark.parametrize(("window", "softcap", "products_up_to"), crossed((None, 1, 5, 300), (None, 0.8), (256, 0)))
@settings(max_examples=examples(25), deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)), min_size=1, max_size=4
    ).map(tuple),
    max_logits=st.sampled_from([1, 1 << 26]),
)
def test_attention_over_shared_prompts_equals_that_of_each_sample(
    window: int | None, softcap: float | None, products_up_to: int, groups: tuple, max_logits: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = make_samples(groups)
    q, k, v = (torch.randn(997, num, 8, generator=generator).requires_grad_() for num in (6, 2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention_padded.PRODUCTS_UP_TO, "cpu", products_up_to)
        patch.setattr(attention_blocks, "_MAX_LOGITS", max_logits)
        found, exact = (attended(each, q, k, v, window=window, softcap=softcap) for each in (samples, unshared(samples)))
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
        grad = torch.randn(found.shape, generator=generator)
        for one, other in zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (found, exact)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("kind", "checkpointing"), crossed([kind for kind in CONFIGS if kind not in HYBRID], RUNGS))
def test_every_family_computes_the_same(kind: str, checkpointing: Checkpointing) -> None:
    policy, samples = policy_of(make_model(kind, seed=5), checkpointing=checkpointing), make_samples(GROUPS)
    weights_N = torch.randn(int(samples.num_completion_S.sum()), generator=torch.Generator().manual_seed(1))
    scores, gradients = [], []
    for each in (samples, unshared(samples)):
        log_probs_N, entropy_N = policy(token_batch(each, device=CPU))
        (log_probs_N * weights_N).sum().backward()
        scores.append((log_probs_N, entropy_N))
        gradients.append({name: param.grad.clone() for name, param in trained_parameters(policy.causal_lm)})
        policy.zero_grad()
    for found, exact in zip(*scores, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if kind.startswith("gemma4") else 2e-6  # its logits are not scaled
    for name, exact in gradients[1].items():
        assert (gradients[0][name] - exact).norm() <= tolerance * max(1.0, exact.norm()), name


QWEN = MODELS["qwen2.5-0.5b"]
SETTINGS: dict[str, Any] = {"shape": QWEN, "attention": full_attention(QWEN), "dtype": torch.bfloat16, "device": CPU}


class Forgetful(PromptBlocks):
    """Computes backward from the prompt's log-sum alone, as if the merge were ignored."""

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: Any) -> Any:
        own_out, own_lse = self.forward(q, k, v, settings)
        return super().backward(grad, q, k, v, own_out, own_lse.contiguous(), settings)


@pytest.mark.parametrize(("blocks", "fault"), [(PromptBlocks, None), (Forgetful, "its dq is off by")])
def test_a_trial_tells_right_gradients_from_wrong_ones(
    blocks: type[PromptBlocks], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This takes the place of FlashAttention.
    monkeypatch.setitem(attention._OWN, "fa4", OwnBlocks.of)
    monkeypatch.setitem(attention._PROMPTS, "fa4", blocks)
    fault_with_shared_prompts.cache_clear()
    found = fault_with_shared_prompts("fa4", **SETTINGS)
    fault_with_shared_prompts.cache_clear()
    assert found is None if fault is None else fault in str(found)


def test_ranks_hear_which_samples_share_their_prompt() -> None:
    samples = make_samples(GROUPS)
    for each in (samples, unshared(samples)):
        heard = decode_parts(
            [SampleColumns.FromString(part.SerializeToString()) for part in encode_parts(each, [range(len(each))])]
        )[0]
        sent, received = token_batch(each, device=CPU), token_batch(heard, device=CPU)
        assert torch.equal(sent.input_ids_T, received.input_ids_T)
        assert (sent.prompts is None) is (received.prompts is None) is (each is not samples)
