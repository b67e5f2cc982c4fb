"""Kernels of speculative decoding, compiled before the engine serves."""

from __future__ import annotations

import torch


def compile_verification(*, vocab_size: int, device: torch.device) -> None:
    """Compiles the kernels that filter the target distribution of drafts. Only sampling that is not greedy uses them.

    On a new machine FlashInfer compiles them with nvcc, which the first such request would otherwise wait for. vocab_size: of the target.
    """
    from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob  # has them on CUDA only

    probs_BV = torch.full((1, vocab_size), 1 / vocab_size, device=device)
    most_likely_BV = top_k_renorm_prob(probs_BV, torch.full((1,), vocab_size, dtype=torch.int32, device=device))
    top_p_renorm_prob(most_likely_BV, torch.ones(1, device=device))
