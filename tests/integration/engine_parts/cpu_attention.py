"""Batched attention of an engine on a CPU against SGLang's loop over sequences, on the same cache."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from tasuki.rollout.sglang.cpu import attention as cpu
from tasuki.rollout.sglang.cpu.attention import BatchedAttention

NUM_SLOTS, CONTEXT, HEADS, HEAD_SIZE = 2000, 64, 4, 16


@dataclass
class Cache:
    """Sequences at random slots; every slot that no sequence uses holds NaN."""

    seq_lens: torch.Tensor
    kv_heads: int
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    req_to_token: torch.Tensor = field(init=False)
    requests: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.seq_lens)
        self.k, self.v = torch.full((2, NUM_SLOTS, self.kv_heads, HEAD_SIZE), float("nan"))
        self.req_to_token = torch.randint(NUM_SLOTS, (count + 3, CONTEXT), dtype=torch.int32)
        self.requests = torch.randperm(count + 3)[:count]
        slots = torch.randperm(NUM_SLOTS)
        for request, length in zip(self.requests, self.seq_lens.tolist(), strict=True):
            mine, slots = slots[:length], slots[length:]
            self.req_to_token[request, :length] = mine.to(torch.int32)
            self.k[mine], self.v[mine] = torch.randn(2, length, self.kv_heads, HEAD_SIZE)


def backend(cls: type[TorchNativeAttnBackend]) -> TorchNativeAttnBackend:
    return cls(cast(Any, SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)))


@pytest.fixture(autouse=True, params=[2**22, 700], ids=["one group", "many groups"])
def group_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(cpu, "_MAX_ELEMENTS", request.param)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_decode_equals_a_loop_over_sequences(kv_heads: int, window: int | None) -> None:
    cache = Cache(torch.randint(1, CONTEXT, (29,)), kv_heads)
    query = torch.randn(29, HEADS, HEAD_SIZE)
    outputs = [
        backend(cls)._run_sdpa_forward_decode(
            query, torch.full_like(query, 7), cache.k, cache.v, cache.req_to_token, cache.requests, cache.seq_lens,
            scaling=0.3, enable_gqa=kv_heads != HEADS, causal=False, sliding_window_size=window,
        )
        for cls in (BatchedAttention, TorchNativeAttnBackend)
    ]  # fmt: skip
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_extend_equals_a_loop_over_sequences(kv_heads: int, window: int | None) -> None:
    cache = Cache(torch.randint(1, CONTEXT, (17,)), kv_heads)
    new_lens = torch.tensor([1 + int(torch.randint(length, ())) for length in cache.seq_lens.tolist()])
    query = torch.randn(int(new_lens.sum()), HEADS, HEAD_SIZE)
    outputs = [
        backend(cls)._run_sdpa_forward_extend(
            query, torch.full_like(query, 7), cache.k, cache.v, cache.req_to_token, cache.requests, cache.seq_lens,
            cache.seq_lens - new_lens, new_lens, scaling=0.3, enable_gqa=kv_heads != HEADS, causal=True, sliding_window_size=window,
        )
        for cls in (BatchedAttention, TorchNativeAttnBackend)
    ]  # fmt: skip
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_decode", [True, False])
def test_a_sink_takes_its_share_of_the_weights(is_decode: bool) -> None:
    cache = Cache(torch.randint(1, CONTEXT, (9,)), 2)
    new_lens = torch.ones_like(cache.seq_lens) if is_decode else cache.seq_lens.clamp(max=3)
    query, sinks_H = torch.randn(int(new_lens.sum()), HEADS, HEAD_SIZE), torch.randn(HEADS)
    ours = backend(BatchedAttention)
    cast(Any, ours)._sinks_H = sinks_H
    operands = (query, torch.empty_like(query), cache.k, cache.v, cache.req_to_token, cache.requests, cache.seq_lens)
    if is_decode:
        found = ours._run_sdpa_forward_decode(*operands, scaling=0.3)
    else:
        prefix_lens = cache.seq_lens - new_lens
        found = ours._run_sdpa_forward_extend(*operands, prefix_lens, new_lens, scaling=0.3, enable_gqa=True, causal=True)
    rows = iter(zip(query, found, strict=True))
    for request, length, num_new in zip(cache.requests, cache.seq_lens.tolist(), new_lens.tolist(), strict=True):
        slots = cache.req_to_token[request].long()
        for end in range(length - num_new + 1, length + 1):
            q, out = next(rows)
            k, v = (each[slots[:end]].repeat_interleave(HEADS // 2, dim=1) for each in (cache.k, cache.v))
            logits = torch.cat((torch.einsum("hd,khd->hk", q, k) * 0.3, sinks_H[:, None]), dim=1)
            exact = torch.einsum("hk,khd->hd", logits.softmax(-1)[:, :-1], v)
            torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
