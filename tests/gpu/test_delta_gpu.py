"""flash-linear-attention's gated delta rule over packed sequences, against plain torch in float32 on the same GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tasuki.models.shape import DeltaNet
from tasuki.trainer.attention import trial
from tasuki.trainer.attention.delta import FlaDelta, PlainDelta
from tasuki.trainer.attention.trial import choose_delta, delta_fault
from tests.models import make_model
from tests.unit.test_packed_attention import pack, policy_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CUDA = torch.device("cuda")
# The heads of Qwen3.5 4B and 27B.
DELTA = DeltaNet(
    layers=frozenset({0}), num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, kernel_size=4
)
LENGTHS = (1, 63, 64, 65, 500, 1003)


@pytest.mark.parametrize("num_value_heads", [32, 48])
def test_the_kernels_are_chosen_for_published_heads(num_value_heads: int) -> None:
    assert choose_delta(replace(DELTA, num_value_heads=num_value_heads), dtype=torch.bfloat16, device=CUDA) is FlaDelta


def test_a_wrong_kernel_is_found_out() -> None:
    class Carrying(FlaDelta):
        """Takes all tokens for one sequence, as transformers does without the lengths."""

        def __init__(self, cu_seqlens_S: torch.Tensor) -> None:
            super().__init__(cu_seqlens_S[[0, -1]])

    fault = delta_fault(Carrying, DELTA, dtype=torch.bfloat16, device=CUDA)
    assert fault is not None and "is off by" in fault


def test_packed_equals_alone_bit_for_bit() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    num_tokens, heads = sum(LENGTHS), DELTA.num_value_heads
    q, k, v = (torch.randn(num_tokens, heads, 128, generator=generator, device=CUDA).bfloat16() for _ in range(3))
    decay, beta = (torch.rand(num_tokens, heads, generator=generator, device=CUDA) for _ in range(2))
    x = torch.randn(num_tokens, DELTA.conv_size, generator=generator, device=CUDA).bfloat16()
    weight = torch.randn(DELTA.conv_size, 4, generator=generator, device=CUDA).bfloat16()

    def run(rows: slice, *lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
        sequences = FlaDelta(torch.tensor([0, *lengths], device=CUDA).cumsum(0, dtype=torch.int32))
        inputs = (each[rows] for each in (q, k, v))
        out = sequences.recur(*inputs, decay_TH=-decay[rows], beta_TH=beta[rows].bfloat16())
        return out, sequences.convolve(x[rows], weight)

    packed, first = run(slice(None), *LENGTHS), 0
    for length in LENGTHS:
        rows = slice(first, first + length)
        for whole, alone in zip(packed, run(rows, length), strict=True):
            assert torch.equal(whole[rows], alone)
        first += length


def test_a_model_in_bfloat16_scores_and_learns_as_in_plain_torch() -> None:
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    batch, results = pack((7, 70, 1, 129)), []
    batch = type(batch)(**{
        name: value.to(CUDA) if isinstance(value := getattr(batch, name), torch.Tensor) else value for name in batch.__slots__
    })  # fmt: skip
    for kernel in (FlaDelta, PlainDelta):
        policy = policy_of(make_model("qwen3_5", seed=5, **sizes)).to(CUDA, torch.bfloat16)
        policy._attention = replace(policy._attention, delta=kernel)
        scores_N = policy(batch)[0]
        scores_N.sum().backward()
        results.append((scores_N.detach(), {name: param.grad for name, param in policy.named_parameters()}))
    (found_N, gradients), (exact_N, exact) = results
    assert float((found_N - exact_N).abs().mean()) < 0.02
    for name, gradient in gradients.items():
        assert float((gradient.float() - exact[name].float()).norm()) < 0.05 * float(exact[name].float().norm()) + 1e-3, name


def test_missing_kernels_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "delta_fault", lambda *_, **__: "ImportError: No module named 'fla'")
    choose_delta.cache_clear()
    with pytest.raises(trial.UnsupportedModel, match="need flash-linear-attention"):
        choose_delta(DELTA, dtype=torch.bfloat16, device=CUDA)
    choose_delta.cache_clear()
