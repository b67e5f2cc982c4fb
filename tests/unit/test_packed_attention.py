"""Packed sequences through every family, and their attention, against transformers and the formula."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasuki.models.family import full_attention
from tasuki.models.known import read_model
from tasuki.planner.node import Checkpointing
from tasuki.planner.presets import MODELS
from tasuki.trainer.attention import packed
from tasuki.trainer.attention import padded as attention_padded
from tasuki.trainer.attention.blocks import OwnBlocks
from tasuki.trainer.attention.packed import IMPLEMENTATION, AttentionBackend, PackedAttention
from tasuki.trainer.attention.padded import PaddedSequences
from tasuki.trainer.attention.trial import choose_kernel
from tasuki.trainer.backends.fsdp.activations import set_checkpointing
from tasuki.trainer.backends.fsdp.lora.adapters import trained_parameters
from tasuki.trainer.backends.fsdp.model import Policy
from tasuki.trainer.data.micro_batch import TokenBatch
from tasuki.trainer.modules.routing import replace_routers
from tasuki.wire.errors import InvalidArgument
from tests.extent import crossed
from tests.models import CONFIGS, VOCAB_SIZE, make_model

LENGTHS = (7, 20, 1, 12, 12, 65)
"""Lengths above the windows of tests.models, in two groups."""
RUNGS = (Checkpointing.NONE, Checkpointing.ATTENTION, Checkpointing.FULL)


def pack(lengths: tuple[int, ...], *, seed: int = 0) -> TokenBatch:
    """Random tokens; every token but the last of a sequence predicts the next."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCAB_SIZE, (length + 1,), generator=generator) for length in lengths]
    num_tokens = sum(lengths)
    return TokenBatch(
        input_ids_T=torch.cat([each[:-1] for each in tokens]),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens_S=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        max_seqlen=max(lengths),
        places_N=torch.arange(num_tokens),
        token_ids_N=torch.cat([each[1:] for each in tokens]),
        temperature_N=torch.full((num_tokens,), 0.7),
        num_places=(num_tokens,),
    )


def policy_of(
    causal_lm: PreTrainedModel, *, checkpointing: Checkpointing = Checkpointing.NONE, backend: AttentionBackend = "sdpa"
) -> Policy:
    """Builds a policy from a copy of the model."""
    causal_lm = deepcopy(causal_lm)
    causal_lm.config._attn_implementation = IMPLEMENTATION  # a tower keeps its own
    replace_routers(causal_lm)
    set_checkpointing(causal_lm, checkpointing, on_host=None)
    causal_lm.train()
    model = read_model({**causal_lm.config.to_dict(), "architectures": [type(causal_lm).__name__]})
    attention = PackedAttention(backend, model.attention)
    return Policy(causal_lm, attention=attention, final_logit_softcap=model.final_logit_softcap)


def plain_log_probs(causal_lm: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Runs each sequence by itself through transformers' own attention."""
    causal_lm.set_attn_implementation("eager")
    rows = [
        causal_lm(input_ids=batch.input_ids_T[first:end].unsqueeze(0), use_cache=False).logits.squeeze(0)
        for first, end in zip(batch.cu_seqlens_S, batch.cu_seqlens_S[1:], strict=False)
    ]
    log_probs = torch.log_softmax(torch.cat(rows).float() / batch.temperature_N.unsqueeze(1), -1)
    return log_probs.gather(1, batch.token_ids_N.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize(("kind", "checkpointing"), crossed(CONFIGS, RUNGS))
def test_a_pack_equals_its_sequences_one_by_one(kind: str, checkpointing: Checkpointing) -> None:
    causal_lm, batch = make_model(kind, seed=5), pack(LENGTHS)
    check_alike(causal_lm, policy_of(causal_lm, checkpointing=checkpointing), batch)


@pytest.mark.parametrize("checkpointing", RUNGS)
def test_so_does_one_in_blocks_of_a_kernel(checkpointing: Checkpointing, monkeypatch: pytest.MonkeyPatch) -> None:
    # These blocks take the place of FlashAttention's.
    monkeypatch.setitem(packed._OWN, "fa4", OwnBlocks.of)
    monkeypatch.setitem(attention_padded.PRODUCTS_UP_TO, "cpu", 0)
    causal_lm, batch = make_model("qwen2", seed=5), pack(LENGTHS)
    check_alike(causal_lm, policy_of(causal_lm, checkpointing=checkpointing, backend="fa4"), batch)


def check_alike(causal_lm: PreTrainedModel, policy: Policy, batch: TokenBatch) -> None:
    """Compares log-probs and gradients with those of transformers' own attention."""
    weights_N = torch.randn(len(batch.token_ids_N), generator=torch.Generator().manual_seed(1))
    found_N, exact_N = policy(batch)[0], plain_log_probs(causal_lm, batch)
    torch.testing.assert_close(found_N, exact_N, rtol=1e-5, atol=1e-5)
    (found_N * weights_N).sum().backward()
    (exact_N * weights_N).sum().backward()
    exact = dict(causal_lm.named_parameters())
    for name, param in trained_parameters(policy.causal_lm):
        # Sums over all tokens, of terms that mostly cancel. Gemma 4 does not scale its logits.
        tolerance = 2e-5 if name.endswith(("dt_bias", "A_log")) else 1e-5 if "Gemma4" in type(causal_lm).__name__ else 2e-6
        assert (param.grad - exact[name].grad).norm() <= tolerance * max(1.0, exact[name].grad.norm()), name


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, window: int | None, softcap: float | None
) -> Tensor:
    """Computes attention by its formula, one sequence after the other."""
    outs: list[Tensor] = []
    for q_L, k_L, v_L in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        length, group = len(q_L), q.shape[1] // k.shape[1]
        k_L, v_L = k_L.repeat_interleave(group, 1), v_L.repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q_L, k_L) * 0.3
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        behind = torch.arange(length).unsqueeze(1) - torch.arange(length)
        logits = logits.masked_fill((behind < 0) | (behind >= (window or length)), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1), v_L))
    return torch.cat(outs)


@pytest.mark.parametrize("products_up_to", [256, 0], ids=["products", "fused"])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 1, 5, 300])
def test_attention_equals_its_formula(
    window: int | None, softcap: float | None, products_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention_padded.PRODUCTS_UP_TO, "cpu", products_up_to)
    lengths, generator = (3, 300, 1, 70, 66, 3), torch.Generator().manual_seed(0)
    heads = (6, 2, 2, 6)
    q, k, v, grad = (torch.randn(sum(lengths), num, 8, generator=generator).requires_grad_() for num in heads)
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    sequences = PaddedSequences.of(starts, 300)
    assert sequences.groups == ((1, 300), (2, 70), (3, 3))
    found = sequences.attend(q, k, v, scale=0.3, window=window, softcap=softcap)
    exact = attend_plainly(q, k, v, lengths, window=window, softcap=softcap)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (found, exact)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_sequences_of_one_length_are_not_copied() -> None:
    q = torch.randn(24, 2, 8)
    sequences = PaddedSequences.of(torch.tensor([0, 12, 24], dtype=torch.int32), 12)
    assert not sequences.is_padded
    found = sequences.attend(q, q, q, scale=0.3, window=None, softcap=None)
    torch.testing.assert_close(found, attend_plainly(q, q, q, (12, 12), window=None, softcap=None))


@pytest.mark.parametrize("backend", ["fa4", "varlen"])
def test_a_kernel_that_cannot_compute_the_model_is_refused(backend: str) -> None:
    settings = {"shape": MODELS["qwen2.5-0.5b"], "dtype": torch.bfloat16, "device": torch.device("cpu")}
    attention = full_attention(MODELS["qwen2.5-0.5b"])
    with pytest.raises(
        InvalidArgument, match=f'^trainer.attention_backend: "{backend}" is not possible here: it needs device = "cuda"'
    ) as refused:
        choose_kernel(backend, attention=attention, **settings)
    assert refused.value.metadata["field"] == "trainer.attention_backend"
    assert choose_kernel("auto", attention=attention, **settings) == "sdpa"
