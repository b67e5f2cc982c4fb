"""Share of an adapter on each engine rank, by SGLang's own layers without an engine: even, replicated and padded shapes."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.lora.layers import MergedColumnParallelLinearWithLoRA, QKVParallelLinearWithLoRA, RowParallelLinearWithLoRA
from sglang.srt.runtime_context import get_parallel
from torch.nn.functional import pad

from tasuki.config.trainer_schema import LoraConfig
from tasuki.rollout.sglang.adapter import AdapterBuffers, _Unpinned
from tasuki.wire.errors import BadHandle, UnsupportedModel

HIDDEN, HEAD, RANK = 64, 16, 3
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Heads, key-value heads and intermediate size: of the checkpoint, and as SGLang pads them on a CPU at this TP size.
EVEN = ((4, 2, 128), (4, 2, 128), 2)
REPLICATED = ((4, 2, 128), (4, 2, 128), 4)
PADDED = ((4, 1, 96), (8, 2, 128), 2)
PADDED_WIDELY = ((4, 2, 96), (8, 4, 128), 4)
Shape = tuple[tuple[int, int, int], tuple[int, int, int], int]


@contextmanager
def place_of(tp_rank: int, tp_size: int) -> Iterator[dict[str, Any]]:
    """The rank's place as arguments of its layers; from 0.5.23 on they look for it in SGLang's context."""
    place: dict[str, Any] = {"tp_rank": tp_rank, "tp_size": tp_size}
    if place.keys() <= signature(RowParallelLinear).parameters.keys():
        yield place
    else:
        with get_parallel().override(**place):
            yield {}


def layer_of(shape: Shape, tp_rank: int) -> dict[str, Any]:
    """Makes the rank's modules of one layer, as SGLang does."""
    _, (heads, kv_heads, intermediate), tp_size = shape
    backend = cast(Any, None)
    with place_of(tp_rank, tp_size) as tp, _Unpinned():
        tp["bias"] = False
        gate_up = MergedColumnParallelLinear(HIDDEN, [intermediate] * 2, **tp)
        return {
            "qkv_proj": QKVParallelLinearWithLoRA(QKVParallelLinear(HIDDEN, HEAD, heads, kv_heads, **tp), backend),
            "o_proj": RowParallelLinearWithLoRA(RowParallelLinear(heads * HEAD, HIDDEN, **tp), backend),
            "gate_up_proj": MergedColumnParallelLinearWithLoRA(gate_up, backend),
            "down_proj": RowParallelLinearWithLoRA(RowParallelLinear(intermediate, HIDDEN, **tp), backend),
        }


def pool_of(shape: Shape) -> SimpleNamespace:
    """Makes a rank's LoRA buffers for the layer, filled with NaN."""
    _, (heads, kv_heads, intermediate), tp_size = shape
    q_rows, kv_rows, mlp_rows = heads * HEAD // tp_size, max(1, kv_heads // tp_size) * HEAD, intermediate // tp_size
    sizes = {
        "qkv_proj": (3, HIDDEN, q_rows + 2 * kv_rows),
        "o_proj": (1, q_rows, HIDDEN),
        "gate_up_proj": (2, HIDDEN, 2 * mlp_rows),
        "down_proj": (1, mlp_rows, HIDDEN),
    }
    nan = float("nan")
    return SimpleNamespace(
        get_buffer_id=lambda _: 0,
        A_buffer={kind: [torch.full((1, parts * RANK, inputs), nan)] for kind, (parts, inputs, _) in sizes.items()},
        B_buffer={kind: [torch.full((1, outputs, RANK), nan)] for kind, (_, _, outputs) in sizes.items()},
    )


def buffers_of(shape: Shape, tp_rank: int, *, changed: dict[str, Any] | None = None) -> AdapterBuffers:
    """changed: modules that replace the layer's."""
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    originals = ("original_num_attention_heads", "original_total_num_kv_heads", "original_intermediate_size")
    config = SimpleNamespace(**dict(zip(sizes, shape[1], strict=True)))
    if shape[0] != shape[1]:
        vars(config).update(zip(originals, shape[0], strict=True))
    modules = {f"layers.0.{kind}": module for kind, module in (layer_of(shape, tp_rank) | (changed or {})).items()}
    manager = SimpleNamespace(memory_pool=pool_of(shape), lora_modules=[modules], base_hf_config=config, attn_tp_size=shape[2])
    return AdapterBuffers(cast(Any, manager), LoraConfig(rank=RANK, alpha=6, target_modules=TARGETS), tp_rank=tp_rank)


def published(shape: Shape) -> dict[str, torch.Tensor]:
    heads, kv_heads, intermediate = shape[0]
    inputs = {"o_proj": heads * HEAD, "down_proj": intermediate}
    outputs = {
        "q_proj": heads * HEAD,
        "k_proj": kv_heads * HEAD,
        "v_proj": kv_heads * HEAD,
        "o_proj": HIDDEN,
        "down_proj": HIDDEN,
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for part in TARGETS:
        tensors[f"layers.0.{part}.lora_A.weight"] = torch.randn(RANK, inputs.get(part, HIDDEN), generator=generator)
        tensors[f"layers.0.{part}.lora_B.weight"] = torch.randn(outputs.get(part, intermediate), RANK, generator=generator)
    return tensors


def share_of(tensors: dict[str, torch.Tensor], shape: Shape, tp_rank: int) -> dict[str, torch.Tensor]:
    """Returns the rank's expected tensors: its share of each split tensor, padded with zeros to the full size."""
    (heads, kv_heads, intermediate), (padded_heads, padded_kv_heads, padded_intermediate), tp_size = shape
    more_q, more_kv = (padded_heads - heads) * HEAD, (padded_kv_heads - kv_heads) * HEAD
    more_mlp = padded_intermediate - intermediate

    def whole(part: str, factor: str) -> torch.Tensor:
        return tensors[f"layers.0.{part}.lora_{factor}.weight"]

    def rows(part: str, more: int, *, rank: int = tp_rank, num_shares: int = tp_size) -> torch.Tensor:
        return pad(whole(part, "B"), (0, 0, 0, more)).chunk(num_shares)[rank]

    def columns(part: str, more: int) -> torch.Tensor:
        return pad(whole(part, "A"), (0, more)).chunk(tp_size, dim=1)[tp_rank]

    kv = {"num_shares": min(tp_size, padded_kv_heads), "rank": tp_rank // max(1, tp_size // padded_kv_heads)}
    return {
        "qkv_proj.lora_A": torch.cat([whole(part, "A") for part in ("q_proj", "k_proj", "v_proj")]),
        "qkv_proj.lora_B": torch.cat([rows("q_proj", more_q), rows("k_proj", more_kv, **kv), rows("v_proj", more_kv, **kv)]),
        "o_proj.lora_A": columns("o_proj", more_q),
        "o_proj.lora_B": whole("o_proj", "B"),
        "gate_up_proj.lora_A": torch.cat([whole("gate_proj", "A"), whole("up_proj", "A")]),
        "gate_up_proj.lora_B": torch.cat([rows("gate_proj", more_mlp), rows("up_proj", more_mlp)]),
        "down_proj.lora_A": columns("down_proj", more_mlp),
        "down_proj.lora_B": whole("down_proj", "B"),
    }


@pytest.mark.parametrize("shape", [EVEN, REPLICATED, PADDED, PADDED_WIDELY])
def test_each_rank_takes_its_share_of_the_padded_layer_and_zeros_where_the_checkpoint_ends(shape: Shape) -> None:
    tensors = published(shape)
    for tp_rank in range(shape[2]):
        buffers = buffers_of(shape, tp_rank)
        buffers.load_weights(tensors.items())
        held = dict(buffers.named_parameters())
        wanted = share_of(tensors, shape, tp_rank)
        assert sorted(held) == sorted(f"layers.0.{name}" for name in wanted)
        for name, values in wanted.items():
            assert torch.equal(held[f"layers.0.{name}"], values), f"{name} of rank {tp_rank}"


def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    """A tensor as large as the padded layer is refused, too, although it would leave nothing uncovered."""
    tensors = published(PADDED)
    tensors["layers.0.q_proj.lora_B.weight"] = torch.zeros(8 * HEAD, RANK)
    with pytest.raises(
        BadHandle, match=r"q_proj.lora_B.weight is published as \(128, 3\); the engine's has \(64, 3\)"
    ) as caught:
        buffers_of(PADDED, 0).load_weights(tensors.items())
    assert caught.value.metadata == {"tensor": "layers.0.q_proj.lora_B.weight"}


def test_buffers_that_do_not_fit_their_layer_are_refused_with_what_to_change() -> None:
    with place_of(0, 2) as tp, _Unpinned():
        smaller = QKVParallelLinear(HIDDEN, HEAD // 2, 8, 2, bias=False, **tp)
        changed = {"qkv_proj": QKVParallelLinearWithLoRA(smaller, cast(Any, None))}
    with pytest.raises(
        UnsupportedModel, match="qkv_proj: SGLang allocates LoRA buffers of .* at rollout.tp_size = 2; .* rollout.lora"
    ):
        buffers_of(PADDED, 0, changed=changed)
