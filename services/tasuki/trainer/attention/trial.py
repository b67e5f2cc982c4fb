"""A trial of shared-prompt attention on the target device."""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch

from tasuki.models.family import Attention
from tasuki.models.shape import ModelShape
from tasuki.trainer.attention.packed import TOLERANCE, Kernel, sequences_of, with_gradients
from tasuki.trainer.attention.padded import PaddedSequences
from tasuki.trainer.data.micro_batch import TokenBatch, token_batch
from tasuki.trainer.data.samples import NO_PREFIX, Samples

_log = logging.getLogger("tasuki.trainer")
# Two prompts, a sample that shares none, and a sample with a single completion token.
_PREFIXES = (0, 0, 1, NO_PREFIX, 1, 0)
_PROMPTS = (130, 130, 64, 40, 64, 130)
_COMPLETIONS = (1, 65, 129, 90, 33, 201)


@functools.cache
def fault_with_shared_prompts(
    kernel: Kernel, *, shape: ModelShape, attention: Attention, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the kernel cannot share prompts: no support, or wrong results in a trial, which is logged once. None if it can."""
    if kernel == PaddedSequences.of:
        return None
    if any(window is not None for window in attention.windows):
        return f'attention of {shape.architecture} has windows, which need trainer.attention_backend = "sdpa"'
    fault = _fault(kernel, shape, attention, dtype=dtype, device=device)
    if fault is not None:
        _log.warning("event=prefix_sharing choice=false reason=%r", fault)
    return fault


def _fault(kernel: Kernel, shape: ModelShape, attention: Attention, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Errors of output and gradients, compared with plain torch in float32."""
    batch = _batch(device)
    generator = torch.Generator(device).manual_seed(0)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    *qkv, grad = (
        torch.randn(len(batch.input_ids_T), num, shape.head_dim, generator=generator, device=device).to(dtype) for num in heads
    )
    settings = {"scale": attention.query_scale, "window": None, "softcap": None}
    try:
        found = with_gradients(sequences_of(kernel, batch), qkv, grad, **settings)
    except Exception as error:  # noqa: BLE001  a compiler's, a driver's or an import's, whatever it is: the kernel is not usable
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    expected = with_gradients(sequences_of(PaddedSequences.of, batch), [x.float() for x in qkv], grad.float(), **settings)
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        difference = float((one.float() - other).norm() / other.norm())
        if not difference < TOLERANCE:
            return f"its {name} is off by {difference:.3f} in norm"
    return None


def _batch(device: torch.device) -> TokenBatch:
    prompts, completions = np.array(_PROMPTS), np.array(_COMPLETIONS)
    samples = Samples(
        num_prompt_S=prompts,
        num_completion_S=completions,
        policy_version_S=np.zeros(len(prompts), dtype=np.uint64),
        temperature_S=np.ones(len(prompts), dtype=np.float32),
        token_ids_T=np.zeros(int((prompts + completions).sum()), dtype=np.int32),
        columns={"loss_mask": np.ones(int(completions.sum()), dtype=np.float32)},
        prefix_S=np.array(_PREFIXES, dtype=np.int32),
    )
    return token_batch(samples, device=device)
