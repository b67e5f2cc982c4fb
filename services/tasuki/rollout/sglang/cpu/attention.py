"""Attention and sampling of an engine on a CPU.

Attention batches many sequences into one torch call; SGLang's `torch_native` makes one call per sequence. Sampling has a seed per
request; SGLang's own is a Triton kernel.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

# Limits on gathered keys and query-key pairs per call: 4 M elements are 16 MiB in float32.
_MAX_ELEMENTS = 2**22


class BatchedAttention(TorchNativeAttnBackend):
    """SGLang's backend with batched sequences, and with sinks. Falls back to SGLang's loops for encoders.

    A sink is a key and value of zeros after the others, whose logit is in the mask.
    """

    _sinks_H: Tensor | None = None

    def forward_extend(self, *args: Any, sinks: Tensor | None = None, **options: Any) -> Tensor:
        self._sinks_H = sinks
        return super().forward_extend(*args, **options)

    def forward_decode(self, *args: Any, sinks: Tensor | None = None, **options: Any) -> Tensor:
        self._sinks_H = sinks
        return super().forward_decode(*args, **options)

    def _run_sdpa_forward_decode(  # pyright: ignore[reportIncompatibleMethodOverride]  options come by name
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """query, output: [sequences, heads, head_size]; caches: [tokens, kv_heads, head_size]; one query at each sequence's end."""
        if encoder_lens is not None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options
            )
        kv_heads, head_size = k_cache.shape[1:]
        window = options.get("sliding_window_size")
        # Query heads that share a kv head become queries of that head, so no head is repeated.
        query_BHGD = query.view(query.shape[0], kv_heads, -1, head_size)
        for rows, kv_len in _groups(seq_lens.tolist(), elements_per_token=kv_heads * head_size):
            slots_BS, is_seen_BS = _slots(req_to_token, req_pool_indices[rows], seq_lens[rows], kv_len)
            if window is not None:
                is_seen_BS = is_seen_BS & (torch.arange(kv_len) >= seq_lens[rows, None] - 1 - window)
            out_BHGD = scaled_dot_product_attention(
                query_BHGD[rows],
                self._gathered(k_cache, slots_BS, query.dtype),
                self._gathered(v_cache, slots_BS, query.dtype),
                attn_mask=self._mask(is_seen_BS[:, None, None, :], (kv_heads, -1, 1), query.dtype),
                scale=options["scaling"],
            )
            output[rows] = out_BHGD.flatten(1, 2)
        return output

    def _run_sdpa_forward_extend(  # pyright: ignore[reportIncompatibleMethodOverride]  options come by name
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """query, output: [new tokens of all sequences, heads, head_size]; each sequence's new tokens follow its cached prefix."""
        if encoder_lens is not None or not options["causal"]:
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                **options,
            )
        window = options.get("sliding_window_size")
        first_rows = extend_seq_lens.cumsum(0) - extend_seq_lens
        per_token = max(k_cache.shape[1] * k_cache.shape[2], int(extend_seq_lens.max()))
        for rows, kv_len in _groups(seq_lens.tolist(), elements_per_token=per_token):
            new_lens, prefix_lens = extend_seq_lens[rows, None], extend_prefix_lens[rows, None]
            offsets_Q = torch.arange(int(new_lens.max()))
            is_new_BQ = offsets_Q < new_lens
            # Padding beyond a sequence's new tokens repeats its first; the result is discarded.
            query_rows_BQ = torch.where(is_new_BQ, first_rows[rows, None] + offsets_Q, first_rows[rows, None])
            slots_BS, _ = _slots(req_to_token, req_pool_indices[rows], seq_lens[rows], kv_len)
            places_BQS = (prefix_lens + offsets_Q)[:, :, None]
            is_seen_BQS = torch.arange(kv_len) <= places_BQS
            if window is not None:
                is_seen_BQS &= torch.arange(kv_len) >= places_BQS - window
            out_BHQD = scaled_dot_product_attention(
                query[query_rows_BQ].transpose(1, 2),
                self._gathered(k_cache, slots_BS, query.dtype),
                self._gathered(v_cache, slots_BS, query.dtype),
                attn_mask=self._mask(is_seen_BQS[:, None], (-1, 1, 1), query.dtype),
                scale=options["scaling"],
                enable_gqa=options["enable_gqa"],
            )
            output[query_rows_BQ[is_new_BQ]] = out_BHQD.transpose(1, 2)[is_new_BQ]
        return output

    def _gathered(self, cache: Tensor, slots_BS: Tensor, dtype: torch.dtype) -> Tensor:
        """[sequences, kv_heads, tokens, head_size], with one more token for sinks."""
        tokens = cache[slots_BS].to(dtype).transpose(1, 2)
        return tokens if self._sinks_H is None else pad(tokens, (0, 0, 0, 1))

    def _mask(self, is_seen: Tensor, heads: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The mask that sdpa takes, for keys as _gathered. heads: shape of the sinks, by which they align with is_seen."""
        if self._sinks_H is None:
            return is_seen
        sinks = self._sinks_H.to(dtype).view(heads)
        logits = torch.zeros(is_seen.shape, dtype=dtype).masked_fill(~is_seen, -torch.inf)
        logits = logits.expand(*torch.broadcast_shapes(logits.shape[:-1], sinks.shape[:-1]), -1)
        return torch.cat((logits, sinks.expand(*logits.shape[:-1], 1)), dim=-1)


def install_cpu_latent_attention() -> None:
    """Makes SGLang rotate heads of latent attention as on other devices, and attend to what is cached without expanding it.

    SGLang's own is for CPUs with AMX, and has no angles but those of YaRN.
    """
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    of_yarn: Any = factory.get_rope_cpu

    def get_rope_cpu(*settings: Any) -> Any:
        *given, _ = settings  # the device
        return of_yarn(*settings) if given[5] is not None else factory.get_rope(*given)

    factory.get_rope_cpu = get_rope_cpu
    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


def install_without_triton() -> None:
    """Has SGLang 0.5.17 place tokens without Triton, which "triton" implies: the one name under which it lets us serve Gemma 4 on a CPU."""
    from sglang.srt.mem_cache import allocation
    from sglang.srt.model_executor import forward_batch_info

    allocation.support_triton = forward_batch_info.support_triton = lambda _: False


def _groups(lengths: Sequence[int], *, elements_per_token: int) -> Iterator[tuple[Tensor, int]]:
    """Groups of sequences of similar length, padded and computed together, with the longest length of each group."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    while order:
        longest = lengths[order[0]]
        count = max(1, _MAX_ELEMENTS // (longest * elements_per_token))
        rows, order = order[:count], order[count:]
        yield torch.tensor(rows), longest


def _slots(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """Cache slots [sequences, kv_len], and a mask of the real ones; padding repeats a sequence's own first slot."""
    slots = req_to_token[req_pool_indices, :kv_len]
    is_used = torch.arange(kv_len) < seq_lens[:, None]
    return torch.where(is_used, slots, slots[:, :1]), is_used


_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
_FRACTION_BITS = 53


def multinomial_with_seed(log_probs_BV: torch.Tensor, seed_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Draws one index per row, determined by the row's distribution, seed and position; replaces SGLang's function.

    log_probs_BV: [B, V], -inf for excluded indices; rows need not sum to 1. Returns [B, 1] int64.
    Method: inverse of the cumulative distribution at a hash of (seed, position).
    """
    cumulative_BV = log_probs_BV.double().exp().cumsum(dim=-1)
    total_B1 = cumulative_BV[:, -1:].contiguous()
    target_B1 = _uniform(seed_B, positions_B).unsqueeze(1) * total_B1
    index_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    # Rounding at the upper end could step past the last index with a probability.
    last_B1 = torch.searchsorted(cumulative_BV, total_B1)
    # With NaN logits nothing is found. Any index will do: its log-prob is NaN too, and the service refuses the sample.
    return torch.minimum(index_B1, last_B1).clamp_max(log_probs_BV.shape[-1] - 1)


def _uniform(seed_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """[B] float64 in [0, 1), by splitmix64 over seed and position."""
    mixed = _mix(_mix(seed_B.to(torch.int64)) + positions_B.to(torch.int64) * _STEP)
    bits = (mixed >> (64 - _FRACTION_BITS)) & ((1 << _FRACTION_BITS) - 1)
    return bits.double() / (1 << _FRACTION_BITS)


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = (words + _STEP) * _MIX
    words = (words ^ ((words >> 31) & ((1 << 33) - 1))) * _STEP
    return words ^ ((words >> 29) & ((1 << 35) - 1))
