"""Bytes of one engine rank: weights sharded by TP, and the KV cache from SGLang's memory fraction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tasuki.config.engine_arguments import DRAFT_BLOCKS
from tasuki.memory.granularity import arena_bytes
from tasuki.models.shape import ROUTER, VOCABULARY_STEP, Shapes
from tasuki.planner.kv_tokens import CPU_TOKENS
from tasuki.planner.layout import Layout

# SGLang's chunked prefill on a GPU with much memory; rollout/arguments.py sets it on a CPU.
_PREFILL_TOKENS = 8192
_CONTEXT_SLACK = 8
MEASURED_FREE = 0.03
"""Most of the free memory that SGLang leaves when it checks the cache whose tokens are planned (rollout/arguments.py)."""
# Of CUDA graphs, whatever their batches.
_GRAPHS = 100 * 10**6


@dataclass(frozen=True, slots=True)
class KvPool:
    """The KV cache of one engine rank."""

    num_tokens: int
    num_bytes: int


def engine_weights(layout: Layout) -> int:
    """Parameters of one rank in the engine's dtype, rounded up by the arena."""
    model = layout.model
    # A key-value head that cannot be split is replicated.
    repeats = max(1, layout.tp_size // model.num_kv_heads)
    whole = replace(model, num_kv_heads=model.num_kv_heads * repeats)
    tensors = [numel * layout.engine_bytes for unit in whole.units() for numel in _rank_tensors(unit, layout.tp_size)]
    if model.has_whole_embedding:
        # In addition to the part counted above.
        tensors.append(model.vocab_size * model.hidden_size * (layout.tp_size - 1) // layout.tp_size * layout.engine_bytes)
    # The rotary tables, in float32.
    tensors.append(model.context_length * model.head_dim * 4)
    return arena_bytes(tuple(tensors), device=layout.device)


def kv_bytes_per_token(layout: Layout) -> int:
    """Keys and values of one token in all layers of one rank."""
    heads = max(1, layout.model.num_kv_heads // layout.tp_size)
    return 2 * layout.model.num_layers * heads * layout.model.head_dim * layout.engine_bytes


def kv_pool(layout: Layout, *, taken_bytes: int) -> KvPool:
    """SGLang's cache at start: kv_ratio of the memory then free, minus the weights; at most kv_tokens.

    taken_bytes: used by others and by contexts on the GPU at that time.
    """
    each = kv_bytes_per_token(layout)
    most = layout.kv_tokens
    if layout.device == "cpu":
        most = max(CPU_TOKENS, layout.longest_sequence) if most is None else most
        num_buffers = 2 * layout.model.num_layers  # keys and values
        buffer = (most + _CONTEXT_SLACK + 1) * each // num_buffers
        # SGLang's table of every request's slots.
        table = (layout.max_running_requests + 1) * (layout.longest_sequence + _CONTEXT_SLACK + 4) * 4
        return KvPool(most, arena_bytes((table, *(buffer,) * num_buffers), device=layout.device))
    pool = int((layout.gpu_bytes - taken_bytes) * layout.kv_ratio) - engine_weights(layout)
    num_tokens = max(0, pool) // each
    if most is not None:
        num_tokens = min(num_tokens, most)
    return KvPool(num_tokens, num_tokens * each)


def cuda_graphs(layout: Layout) -> int:
    """Logits and one layer's activations of the largest batch, and a fixed part. Fitted to 7B on an H200 at 256 and 544 requests."""
    if layout.device == "cpu" or not layout.has_cuda_graphs:
        return 0
    model = layout.model
    logits = 4 * model.vocab_size * (1 if layout.tp_size == 1 else 2)
    layer = 3 * -(-model.intermediate_size // layout.tp_size) * layout.engine_bytes
    num_tokens = layout.graph_requests * max(1, layout.draft_tokens)
    return max(layout.overheads.cuda_graph, _GRAPHS + num_tokens * (logits + layer))


def engine_step(layout: Layout) -> int:
    """Working memory of a full prefill and of sampling, outside SGLang's fraction. Fitted to H200s (docs/plan.md)."""
    if layout.device == "cpu":
        return 0
    model = layout.model
    width = 4 * model.hidden_size + 3 * -(-max(model.intermediate_size, model.query_size) // layout.tp_size)
    # Logits in float32 and a copy of them. Verification of drafts has its own blocks (rollout/sglang/speculative.py).
    copies = DRAFT_BLOCKS * layout.draft_tokens if layout.draft_tokens else 2
    sampling = layout.max_running_requests * model.vocab_size * 4 * copies
    return _PREFILL_TOKENS * width * layout.engine_bytes + sampling


def _rank_tensors(unit: Shapes, tp_size: int) -> list[int]:
    """Elements of a rank's parameters in one unit: SGLang fuses q, k and v, and gate and up."""
    joined: dict[str, int] = {}
    for name, shape in unit.items():
        for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            name = name.replace(part, "qkv_proj" if part in ("q_proj", "k_proj", "v_proj") else "gate_up_proj")
        joined[name] = joined.get(name, 0) + _rank_numel(name, shape, tp_size)
    return list(joined.values())


def _rank_numel(name: str, shape: tuple[int, ...], tp_size: int) -> int:
    whole = math.prod(shape)
    if name in ("embed_tokens.weight", "lm_head.weight"):
        rows = -(-shape[0] // VOCABULARY_STEP) * VOCABULARY_STEP
        return -(-rows // tp_size) * shape[1]
    replicated = "norm" in name or name == ROUTER or name.endswith(("o_proj.bias", "down_proj.bias"))
    return whole if replicated else -(-whole // tp_size)
