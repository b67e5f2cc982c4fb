"""Trials of kernels on the target device: which one computes a network's attention, whether it can share prompts, and gated delta nets."""

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from tasuki.models.family import Attention
from tasuki.models.shape import DeltaNet, ModelShape
from tasuki.trainer.attention.delta import DeltaKernel, DeltaSequences, FlaDelta, PlainDelta
from tasuki.trainer.attention.flash import HEAD_DIM_STEP, MAX_HEAD_DIM
from tasuki.trainer.attention.packed import AttentionBackend, Sequences, sequences_of
from tasuki.trainer.data.micro_batch import TokenBatch, token_batch
from tasuki.trainer.data.samples import NO_PREFIX, Samples
from tasuki.wire.errors import InvalidArgument, UnsupportedModel

_log = logging.getLogger("tasuki.trainer")
# In bfloat16, a kernel's output and gradients differ from float32's by less than 0.01 in norm.
_TOLERANCE = 0.02
# Lengths of the trial sequences: around tiles of 64 and 128 tokens or chunks of 64, and a single token.
_LENGTHS, _DELTA_LENGTHS = (1, 127, 129, 64, 300), (1, 63, 65, 64, 200)
_SHORT_WINDOW = 100
# Two prompts, a sample that shares none, and a sample with a single completion token.
_PREFIXES = (0, 0, 1, NO_PREFIX, 1, 0)
_PROMPTS = (130, 130, 64, 40, 64, 130)
_COMPLETIONS = (1, 65, 129, 90, 33, 201)


@functools.cache
def choose_kernel(
    wanted: AttentionBackend | Literal["auto"],
    *,
    shape: ModelShape,
    attention: Attention,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """Chooses a network's kernel by trial on this device: `wanted`, or for "auto" the first correct one of fa4, varlen and sdpa.

    Logs the choice and reasons once. Raises InvalidArgument if `wanted` cannot compute the model.
    """
    candidates: list[AttentionBackend] = ["fa4", "varlen", "sdpa"] if wanted == "auto" else [wanted]
    for backend in candidates:
        started = time.monotonic()
        problem = None
        if backend != "sdpa":
            problem = _unsupported(shape, attention, dtype=dtype, device=device)
            problem = problem or _fault(backend, shape=shape, attention=attention, dtype=dtype, device=device)
        if problem is None:
            seconds = time.monotonic() - started
            _log.info("event=attention backend=%s architecture=%s seconds=%.1f", backend, shape.architecture, seconds)
            return backend
        if wanted != "auto":
            raise InvalidArgument("trainer.attention_backend", f'"{wanted}" is not possible here: {problem}')
        if device.type == "cuda":
            _log.warning("event=attention_unusable backend=%s architecture=%s cause=%a", backend, shape.architecture, problem)
    raise AssertionError("sdpa supports every model")


def _unsupported(shape: ModelShape, attention: Attention, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FlashAttention's kernels do not support a model."""
    if device.type != "cuda":
        return 'it needs device = "cuda"'
    if dtype != torch.bfloat16:
        return 'it needs trainer.compute_dtype = "bfloat16"'
    if attention.logit_softcap is not None:
        return f"its backward pass cannot cap logits, which {shape.architecture} does at {attention.logit_softcap:g}"
    if shape.head_dim % HEAD_DIM_STEP or shape.head_dim > MAX_HEAD_DIM:
        return f"head_dim must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, not {shape.head_dim}"
    return None


def choose_sharing(backend: AttentionBackend, wanted: Literal["auto"] | bool, **settings: Any) -> bool:
    """Whether micro-batches may have shared prompts, by trial for "auto". settings: as of choose_kernel, whose result is `backend`.

    Raises InvalidArgument if that is wanted and not possible.
    """
    if wanted is False:
        return False
    fault = fault_with_shared_prompts(backend, **settings)
    if fault is not None and wanted is True:
        raise InvalidArgument("trainer.prefix_sharing", f"true is not possible here: {fault}")
    return fault is None


@functools.cache
def fault_with_shared_prompts(
    backend: AttentionBackend, *, shape: ModelShape, attention: Attention, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the kernel cannot share prompts: no support, or wrong results in a trial, which is logged once. None if it can."""
    if backend == "sdpa":
        return None
    if any(window is not None for window in attention.windows):
        return f'attention of {shape.architecture} has windows, which need trainer.attention_backend = "sdpa"'
    fault = _error(backend, _batch(device), shape=shape, attention=attention, dtype=dtype, device=device)
    if fault is not None:
        _log.warning("event=prefix_sharing choice=false reason=%r", fault)
    return fault


def _fault(backend: AttentionBackend, *, attention: Attention, device: torch.device, **settings: Any) -> str | None:
    """Errors of a kernel for this model's heads and windows."""
    starts_S = torch.tensor([0, *_LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    batch = replace(_batch(device), cu_seqlens_S=starts_S, max_seqlen=max(_LENGTHS), prompts=None)
    settings |= {"attention": attention, "device": device}
    for window in sorted({0 if window is None else min(window, _SHORT_WINDOW) for window in attention.windows}):
        fault = _error(backend, batch, window=window or None, **settings)
        if fault is not None:
            return f"{fault} with window {window}" if window else fault
    return None


def _error(
    backend: AttentionBackend,
    batch: TokenBatch,
    *,
    shape: ModelShape,
    attention: Attention,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> str | None:
    """Errors of output and gradients, compared with plain torch in float32. None if they are small."""
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, heads = int(batch.cu_seqlens_S[-1]), (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    *leaves, grad = (
        torch.randn(num_tokens, num, shape.head_dim, generator=generator, device=device).to(dtype) for num in heads
    )
    if attention.has_sinks:
        leaves.append(torch.randn(shape.num_heads, generator=generator, device=device).to(dtype))
    sequences = partial(sequences_of, batch=batch, has_sinks=attention.has_sinks)
    settings = {"scale": attention.query_scale, "window": window, "softcap": None}
    return _fault_of(
        lambda: _with_gradients(sequences(backend), leaves, grad, **settings),
        lambda: _with_gradients(sequences("sdpa"), [x.float() for x in leaves], grad.float(), **settings),
        names=("its output", "its dq", "its dk", "its dv", "its dsinks"),
    )


def _fault_of(kernel: Callable[[], list[Tensor]], plain: Callable[[], list[Tensor]], *, names: Iterable[str]) -> str | None:
    """Errors of a kernel's outputs and gradients, compared with plain torch in float32. None if they are small."""
    try:
        found = kernel()
    except Exception as error:  # noqa: BLE001  a compiler's, a driver's or an import's, whatever it is: the kernel is not usable
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    for name, one, other in zip(names, found, plain(), strict=False):
        difference = float((one.float() - other).norm() / other.norm())
        if not difference < _TOLERANCE:
            return f"{name} is off by {difference:.3f} in norm"
    return None


def _with_gradients(sequences: Sequences, leaves: list[Tensor], grad_THD: Tensor, **settings: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    settings |= {"sinks_H": leaves[3]} if len(leaves) > 3 else {}
    out_THD = sequences.attend(leaves[0], leaves[1], leaves[2], **settings)
    return [out_THD.detach(), *torch.autograd.grad(out_THD, leaves, grad_THD)]


def _batch(device: torch.device) -> TokenBatch:
    prompts, completions = np.array(_PROMPTS), np.array(_COMPLETIONS)
    samples = Samples(
        num_prompt_S=prompts,
        num_completion_S=completions,
        policy_version_S=np.zeros(len(prompts), dtype=np.uint64),
        token_ids_T=np.zeros(int((prompts + completions).sum()), dtype=np.int32),
        columns={"loss_mask": np.ones(int(completions.sum()), dtype=np.float32)},
        prefix_S=np.array(_PREFIXES, dtype=np.int32),
    )
    return token_batch(samples, device=device)


@functools.cache
def choose_delta(delta: DeltaNet, *, dtype: torch.dtype, device: torch.device) -> DeltaKernel:
    """Plain torch on a CPU. On a GPU flash-linear-attention's kernels, once they are correct in a trial, which compiles them.

    Raises UnsupportedModel if they are missing or wrong: plain torch would take many times as long as the rest of a step.
    """
    if device.type == "cpu":
        return PlainDelta
    started = time.monotonic()
    fault = delta_fault(FlaDelta, delta, dtype=dtype, device=device)
    if fault is not None:
        problem = f"gated delta nets need tilelang and flash-linear-attention 0.6, which pip installs; here they fail: {fault}"
        raise UnsupportedModel(f"model.path: {problem}", field="model.path")
    _log.info("event=delta_net kernels=fla seconds=%.1f", time.monotonic() - started)
    return FlaDelta


def delta_fault(kernel: DeltaKernel, delta: DeltaNet, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Errors of outputs and gradients, compared with plain torch in float32. None if they are small."""
    generator = torch.Generator(device).manual_seed(0)
    heads, key_size, value_size = delta.num_value_heads, delta.key_head_dim, delta.value_head_dim
    widths = ((heads, key_size), (heads, key_size), (heads, value_size), (heads,), (heads,), (heads, value_size))
    q, k, v, decay, beta, grad = (
        torch.randn(sum(_DELTA_LENGTHS), *width, generator=generator, device=device) for width in widths
    )
    recurrence = [q.to(dtype), k.to(dtype), v.to(dtype), -softplus(decay) * 0.3, beta.sigmoid().to(dtype)]
    x_TC = torch.randn(sum(_DELTA_LENGTHS), delta.conv_size, generator=generator, device=device).to(dtype)
    weight_CW = torch.randn(delta.conv_size, delta.kernel_size, generator=generator, device=device).to(dtype)
    cu_seqlens_S = torch.tensor([0, *_DELTA_LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    inputs = [*recurrence, x_TC, weight_CW]
    grads = [grad.to(dtype), torch.randn(x_TC.shape, generator=generator, device=device).to(dtype)]
    names = ("recurrence", "convolution", "dq", "dk", "dv", "dg", "dbeta", "dx", "dw")
    return _fault_of(
        lambda: _delta_with_gradients(kernel(cu_seqlens_S), inputs, grads),
        lambda: _delta_with_gradients(PlainDelta(cu_seqlens_S), [x.float() for x in inputs], [x.float() for x in grads]),
        names=names,
    )


def _delta_with_gradients(sequences: DeltaSequences, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    q, k, v, decay_TH, beta_TH, x_TC, weight_CW = leaves
    outs = [sequences.recur(q, k, v, decay_TH=decay_TH, beta_TH=beta_TH), sequences.convolve(x_TC, weight_CW)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, grads)]
