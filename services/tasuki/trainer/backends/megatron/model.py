"""The policy on megatron-core's layers: scores given tokens, each tensor-parallel rank with its part of every layer.

Shape suffixes: T tokens of the micro-batch, H query heads, K key heads, D head size, N completion tokens. Hidden states between layers
are of this rank's part of the tokens (sequence parallelism, arXiv:2205.05198).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from tasuki.algorithms.lm_head import VocabularyShard, token_log_probs
from tasuki.models.family import Model
from tasuki.models.shape import QkNorm
from tasuki.planner.node import Checkpointing
from tasuki.trainer.attention.packed import LayerAttention, PackedAttention, attention_operators
from tasuki.trainer.backends.megatron.groups import Groups
from tasuki.trainer.data.micro_batch import TokenBatch
from tasuki.trainer.modules.experts import GroupedExperts, ParallelExperts
from tasuki.trainer.modules.pointwise import RmsNorm, down_projected, halves
from tasuki.trainer.modules.recompute import recomputing
from tasuki.trainer.modules.rotary import rotated
from tasuki.trainer.modules.routing import Router, Routers


@dataclass(slots=True)
class _Current:
    """What the layers need of the current micro-batch. Its backward must precede the next one."""

    attention: LayerAttention | None = None
    cos_TD: Tensor | None = None
    sin_TD: Tensor | None = None


class _CoreAttention(nn.Module):
    """Takes the place of megatron-core's attention proper: rotates queries and keys, and attends with the house's kernels."""

    def __init__(self, current: _Current, *, layer_number: int, **_: Any) -> None:
        super().__init__()
        self._current, self._layer = current, layer_number - 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """query: [T, 1, H, D], key and value [T, 1, K, D], of this rank's heads. Returns [T, 1, H D]."""
        attention, cos_TD, sin_TD = self._current.attention, self._current.cos_TD, self._current.sin_TD
        assert attention is not None and cos_TD is not None and sin_TD is not None
        q_THD, k_TKD = (rotated(x.squeeze(1), cos_TD, sin_TD) for x in (query, key))
        return attention(q_THD, k_TKD, value.squeeze(1), layer=self._layer).flatten(1).unsqueeze(1)


class _Mlp(MLP):
    """megatron-core's, with the house's fused activation, and without recomputing its second product."""

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """hidden_states: [t, 1, H], of this rank's tokens. Returns as much, and no bias."""
        gate, up = halves(self.linear_fc1(hidden_states)[0])
        down: Any = self.linear_fc2
        if hasattr(down, "lora"):
            return down_projected(gate, up, lambda product: down(product)[0], "silu"), None
        summand = down_projected(gate, up, down.weight, "silu")
        if self.config.sequence_parallel:
            summand = reduce_scatter_to_sequence_parallel_region(summand, group=self.tp_group)
        return summand, None


class _SparseMlp(nn.Module):
    """Takes the place of megatron-core's mixture of experts, as FSDP2 computes it, on this rank's tokens."""

    def __init__(self, config: PreTrainedConfig, groups: Groups) -> None:
        super().__init__()
        self.gate, experts = Router(Qwen3MoeTopKRouter(config)), Qwen3MoeExperts(config)
        is_spread = groups.experts.size() > 1
        self.experts = ParallelExperts(experts, groups.experts) if is_spread else GroupedExperts(experts)

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """hidden: [T, 1, H]. Returns as much, and no bias."""
        _, weights_TK, chosen_TK = self.gate(hidden.squeeze(1))
        return self.experts(hidden.squeeze(1), chosen_TK, weights_TK).unsqueeze(1), None


class _Norm(RmsNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype)), eps)


def layer_config(model: Model, *, eps: float, dtype: torch.dtype, tensor_parallel: int) -> TransformerConfig:
    """megatron-core's description of the layers: without its fused kernels, which need TransformerEngine or Apex, and without dropout."""
    shape = model.shape
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate_size,
        layernorm_epsilon=eps,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm is QkNorm.HEAD,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        gated_linear_unit=True,
        activation_func=silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
    )


class Policy(nn.Module):
    """Scores completion tokens. Only positions that predict one pass through the LM head, whose logits never exist whole."""

    def __init__(
        self, config: PreTrainedConfig, model: Model, groups: Groups, *, dtype: torch.dtype, attention: PackedAttention
    ) -> None:
        """Makes the layers on the meta device. config: of the same model, as transformers reads it."""
        super().__init__()
        shape, size = model.shape, groups.tensor.size()
        self._groups, self.attention, self._current = groups, attention, _Current()
        layers = layer_config(model, eps=config.rms_norm_eps, dtype=dtype, tensor_parallel=size)
        spec = get_gpt_layer_local_spec(qk_layernorm=layers.qk_layernorm, normalization="RMSNorm")
        parts: Any = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = _Norm
        # Replaced below: megatron-core warns of an MLP that it does not know.
        linear, parts.mlp = parts.mlp.submodules, nn.Identity
        inner = parts.self_attention.submodules
        inner.core_attention = partial(_CoreAttention, self._current)
        if layers.qk_layernorm:
            inner.q_layernorm = inner.k_layernorm = _Norm
        with torch.device("meta"):
            self.embedding = VocabParallelEmbedding(
                shape.vocab_size,
                shape.hidden_size,
                init_method=cast(Any, None),  # only used with perform_initialization
                reduce_scatter_embeddings=size > 1,
                config=layers,
                tp_group=groups.tensor,
            )
            block = TransformerBlockSubmodules(layer_specs=[spec] * shape.num_layers, layer_norm=cast(Any, _Norm))
            self.decoder = TransformerBlock(layers, block)
            for layer in cast(Any, self.decoder.layers):
                mlp = _SparseMlp(config, groups) if shape.num_experts else _Mlp(layers, linear, tp_group=groups.tensor)
                layer.mlp = mlp.to(dtype)
            if not shape.is_tied:
                self.head = nn.Parameter(torch.empty(shape.vocab_size // size, shape.hidden_size, dtype=dtype))
        self._is_tied, self._dtype = shape.is_tied, dtype
        self._routers = Routers(cast(nn.ModuleList, self.decoder.layers))
        with groups.device:  # from transformers 5.19 on it takes no device
            self._rotary = LlamaRotaryEmbedding(cast(Any, config))

    def forward(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [N] with gradient, and entropies [N]; float32, the same on every tensor-parallel rank."""
        size = self._groups.tensor.size()
        padded = _padded(batch, multiple=size)
        self._current.attention = self.attention.over(padded)
        self._routers.begin(padded, first_token=self._groups.tensor.rank() * len(padded.input_ids_T) // size)
        like = padded.input_ids_T.new_empty(0, dtype=self._dtype)
        cos, sin = self._rotary(like, padded.position_ids_T.unsqueeze(0))
        self._current.cos_TD, self._current.sin_TD = cos.squeeze(0), sin.squeeze(0)
        hidden = self.embedding(padded.input_ids_T.unsqueeze(0))
        hidden = self.decoder(hidden if size > 1 else hidden.transpose(0, 1), attention_mask=None)
        shard = None
        if size > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=self._groups.tensor)
            shard = VocabularyShard(self._groups.tensor.rank(), self._groups.gather_tensor)
        hidden = hidden.squeeze(1).index_select(0, batch.places_N)  # no other tokens' from here on
        scores_N = token_log_probs(
            hidden,
            self.embedding.weight if self._is_tied else self.head,
            batch.token_ids_N,
            temperature_N=batch.temperature_N,
            shard=shard,
        )
        if padded.routes_TR is not None and batch.routes_TR is not None and not torch.is_grad_enabled() and size > 1:
            # Each rank's routers have written the experts of its tokens.
            own_TR = padded.routes_TR.chunk(size)[self._groups.tensor.rank()].view(torch.uint8)
            whole_TR = self._groups.gather_tensor(own_TR).flatten(0, 1).view(torch.int16)
            batch.routes_TR.copy_(whole_TR[: len(batch.routes_TR)])
        log_probs_N, entropy_N = self.attention.gather(*scores_N, batch=batch)
        return log_probs_N, entropy_N


def set_checkpointing(policy: Policy, checkpointing: Checkpointing, *, kept_layers: int) -> None:
    """Sets what each layer keeps from forward to backward, but for the last `kept_layers`, which keep everything."""
    layers: Any = policy.decoder.layers
    for layer in layers[: len(layers) - kept_layers] if checkpointing is not Checkpointing.NONE else ():
        kept = attention_operators() if checkpointing is Checkpointing.ATTENTION else ()
        layer.forward = partial(recomputing(layer, kept), layer.forward)


def _padded(batch: TokenBatch, *, multiple: int) -> TokenBatch:
    """Adds a sequence of dummy tokens, so that ranks can share the tokens evenly."""
    num = -len(batch.input_ids_T) % multiple
    if not num:
        return batch
    return replace(
        batch,
        input_ids_T=pad(batch.input_ids_T, (0, num)),
        position_ids_T=pad(batch.position_ids_T, (0, num)),
        cu_seqlens_S=torch.cat((batch.cu_seqlens_S, batch.cu_seqlens_S[-1:] + num)),
        max_seqlen=max(batch.max_seqlen, num),
        routes_TR=None if batch.routes_TR is None else pad(batch.routes_TR, (0, 0, 0, num), value=-1),
        num_dummies=batch.num_dummies + num,
    )
