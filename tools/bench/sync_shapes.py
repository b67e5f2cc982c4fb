"""Qwen2.5 without values: tensors that a trainer rank publishes, and a model whose loaders slice for tensor parallelism as SGLang's do."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasuki.weights.export import Shard
from tests.slices import Cut, by_rows


@dataclass(frozen=True, slots=True)
class QwenShape:
    hidden: int
    mlp: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    vocab: int = 152064

    def checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes as in Hugging Face's files."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            layer |= {f"self_attn.{name}_proj.weight": (rows, self.hidden), f"self_attn.{name}_proj.bias": (rows,)}
        layer |= {"self_attn.o_proj.weight": (self.hidden, q), "mlp.down_proj.weight": (self.hidden, self.mlp)}
        layer |= {f"mlp.{name}_proj.weight": (self.mlp, self.hidden) for name in ("gate", "up")}
        return {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            **{f"model.layers.{n}.{name}": shape for n in range(self.num_layers) for name, shape in layer.items()},
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }

    def config(self) -> dict[str, Any]:
        """Returns the model's config.json in Hugging Face's format."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


QWEN = {
    "tiny": QwenShape(hidden=256, mlp=704, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=64, vocab=2048),
    "7b": QwenShape(hidden=3584, mlp=18944, num_layers=28, num_heads=28, num_kv_heads=4),
    "32b": QwenShape(hidden=5120, mlp=27648, num_layers=64, num_heads=40, num_kv_heads=8),
}


def write_config(model: str, folder: Path) -> Path:
    """Writes a model folder without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN[model].config()))
    return folder


def random_shards(
    shape: QwenShape, *, rank: int, num_ranks: int, dtype: torch.dtype, device: torch.device, cut: Cut = by_rows
) -> list[Shard]:
    """Returns the shards of one rank, with random values seeded by the rank; by rows they are FSDP2's."""
    generator = torch.Generator(device).manual_seed(rank)
    shards: list[Shard] = []
    for name, whole in shape.checkpoint().items():
        box = cut(whole, rank, num_ranks)
        if box.numel:
            local = torch.empty(box.sizes, dtype=dtype, device=device).normal_(std=0.02, generator=generator)
            shards.append(Shard(name, whole, box.offsets, local))
    return shards


class QwenModel:
    """Parameters of one tensor-parallel rank under SGLang's names, with a loader."""

    def __init__(self, shape: QwenShape, *, tp_rank: int, tp_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._rank, self._size = shape, tp_rank, tp_size
        q, kv = shape.num_heads * shape.head_dim // tp_size, shape.num_kv_heads * shape.head_dim // tp_size
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (shape.hidden,),
            "post_attention_layernorm.weight": (shape.hidden,),
            "self_attn.qkv_proj.weight": (q + 2 * kv, shape.hidden),
            "self_attn.qkv_proj.bias": (q + 2 * kv,),
            "self_attn.o_proj.weight": (shape.hidden, q),
            "mlp.gate_up_proj.weight": (2 * shape.mlp // tp_size, shape.hidden),
            "mlp.down_proj.weight": (shape.hidden, shape.mlp // tp_size),
        }
        shapes = {
            "model.embed_tokens.weight": (shape.vocab // tp_size, shape.hidden),
            **{f"model.layers.{n}.{name}": size for n in range(shape.num_layers) for name, size in layer.items()},
            "model.norm.weight": (shape.hidden,),
            "lm_head.weight": (shape.vocab // tp_size, shape.hidden),
        }
        self._parameters = {
            name: torch.nn.Parameter(torch.full(size, torch.nan, dtype=dtype, device=device), requires_grad=False)
            for name, size in shapes.items()
        }

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self._parameters.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            self._load(name, loaded)

    def _load(self, name: str, loaded: torch.Tensor) -> None:
        parts = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
        parts |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
        part = next((part for part in parts if part in name), None)
        if part is not None:
            fused, index = parts[part]
            rows = loaded.shape[0] // self._size
            target = self._parameters[name.replace(part, fused)].data
            start = (0, target.shape[0] - 2 * rows, target.shape[0] - rows)[index] if fused == "qkv_proj" else index * rows
            target.narrow(0, start, rows).copy_(loaded.narrow(0, self._rank * rows, rows))
            return
        target = self._parameters[name].data
        dim = next((dim for dim in range(target.dim()) if target.shape[dim] != loaded.shape[dim]), None)
        if dim is not None:
            loaded = loaded.narrow(dim, self._rank * target.shape[dim], target.shape[dim])
        target.copy_(loaded)
