"""Gradients of samples that share prompts, in bfloat16 on a GPU, against float32 without sharing."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from tasuki.models.known import read_model
from tasuki.trainer.attention.packed import IMPLEMENTATION, AttentionBackend, PackedAttention
from tasuki.trainer.attention.trial import choose_kernel, fault_with_shared_prompts
from tasuki.trainer.backends.fsdp.model import Policy
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.data.samples import Samples
from tests.unit.test_prefix_sharing import make_samples, unshared

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
GROUPS = ((1024, (256, 200, 300, 256)), (700, (128, 257, 64, 300)))


def gradients(samples: Samples, dtype: torch.dtype) -> Tensor:
    """Of a weighted sum of log-probs, by a model of 12 layers with the same weights for every dtype."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        architectures=["Qwen2ForCausalLM"],
    )
    causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32).bfloat16().to(CUDA, dtype)
    causal_lm.set_attn_implementation(IMPLEMENTATION)
    model = read_model(config.to_dict())
    backend: AttentionBackend = "sdpa"
    if dtype is torch.bfloat16:
        settings = {"shape": model.shape, "attention": model.attention, "dtype": dtype, "device": CUDA}
        backend = choose_kernel("auto", **settings)
        assert fault_with_shared_prompts(backend, **settings) is None
    policy = Policy(causal_lm, attention=PackedAttention(backend, model.attention))
    log_probs_N, _ = policy(token_batch(samples, device=CUDA))
    weights_N = torch.randn(len(log_probs_N), generator=torch.Generator().manual_seed(1)).to(CUDA)
    (log_probs_N * weights_N).sum().backward()
    return torch.cat([param.grad.float().flatten() for param in policy.parameters()])


def test_sharing_adds_no_error_to_that_of_bfloat16() -> None:
    samples = make_samples(GROUPS)
    samples.token_ids_T[:] %= 512
    exact = gradients(unshared(samples), torch.float32)
    alone, shared = (float((gradients(each, torch.bfloat16) - exact).norm()) for each in (unshared(samples), samples))
    assert shared <= 1.1 * alone
