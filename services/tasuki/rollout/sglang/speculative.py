"""Speculative decoding: its kernels, compiled before the engine serves, and its memory."""

from __future__ import annotations

from typing import Any

import torch

from tasuki.config.engine_arguments import DRAFT_BLOCKS


def compile_verification(*, vocab_size: int, device: torch.device) -> None:
    """Compiles the kernels that filter the target distribution of drafts. Only sampling that is not greedy uses them.

    On a new machine FlashInfer compiles them with nvcc, which the first such request would otherwise wait for. vocab_size: of the target.
    """
    from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob  # has them on CUDA only

    probs_BV = torch.full((1, vocab_size), 1 / vocab_size, device=device)
    most_likely_BV = top_k_renorm_prob(probs_BV, torch.full((1,), vocab_size, dtype=torch.int32, device=device))
    top_p_renorm_prob(most_likely_BV, torch.ones(1, device=device))


def reserve_verification(*, num_tokens: int, vocab_size: int, device: torch.device) -> None:
    """Makes torch cache what the largest verification needs, on the current stream.

    Otherwise a batch that grows leaves blocks behind that are too small for the next one, and the cache grows beyond the plan.
    num_tokens: drafted tokens of all requests.
    """
    blocks = [torch.empty((num_tokens, vocab_size), dtype=torch.float32, device=device) for _ in range(DRAFT_BLOCKS)]
    del blocks


def keep_drafts(worker: Any) -> None:
    """Keeps the n-grams of earlier samples when the KV cache is flushed.

    They depend on tokens alone, and every draft is verified. PAUSE_KV would wait until they are cleared, which is slow.
    """
    worker.clear_cache_pool = lambda: None
