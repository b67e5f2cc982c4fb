"""Bytes of one engine rank: weights sharded by TP, and the KV cache from SGLang's memory fraction."""

import functools
import math
from dataclasses import dataclass, replace

from tasuki.config.checks import replays_routes
from tasuki.config.engine_arguments import DRAFT_BLOCKS, draft_tokens
from tasuki.memory.granularity import arena_bytes
from tasuki.models.routes import RouteShape
from tasuki.models.shape import LAYER_TABLE, ROUTERS, VOCABULARY_STEP, ModelShape, Shapes
from tasuki.planner.kv_tokens import CPU_TOKENS, SGLANG_GRAPH_REQUESTS, graph_requests, running_requests, state_slots
from tasuki.planner.node import Node

# SGLang's chunked prefill on a GPU with much memory; rollout/arguments.py sets it on a CPU.
_PREFILL_TOKENS = 8192
_CONTEXT_SLACK = 8
_FLOAT32 = 4
_CACHED_EMBEDDINGS = 100 * 2**20
"""SGLANG_VLM_CACHE_SIZE_MB."""
MEASURED_FREE = 0.03
"""Most of the free memory that SGLang leaves when it checks the cache whose tokens are planned (rollout/arguments.py)."""
# CUDA graphs: what they take whatever their batches, and at least.
_GRAPHS, _CUDA_GRAPHS = 100 * 10**6, 600 * 10**6
# SGLang pads the inner size of a vision tower's gated MLPs to a multiple of this.
_GATED_STEP = 8
# Every rank has these whole.
_WHOLE = (
    "o_proj.bias",
    "down_proj.bias",
    "down_proj_bias",
    "q_a_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "shared_expert_gate.weight",
    LAYER_TABLE,
    "per_layer_model_projection.weight",
    "per_layer_input_gate.weight",
    "per_layer_projection.weight",
)
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
}


@dataclass(frozen=True, slots=True)
class KvPool:
    """The KV cache of one engine rank."""

    num_tokens: int
    num_bytes: int


def engine_weights(node: Node) -> int:
    """Parameters of one rank in the engine's dtype, rounded up by the arena."""
    return _engine_weights(node.model, node.tp_size, node.engine_bytes, node.device)


@functools.lru_cache(maxsize=16)  # a search plans the same ones a hundred times
def _engine_weights(model: ModelShape, tp_size: int, element_bytes: int, device: str) -> int:
    tensors = [
        numel * (_FLOAT32 if name.endswith("_bias") else element_bytes)  # SGLang's biases of experts
        for unit in (model.root(), *(_engine_layer(model, index, tp_size) for index in range(model.num_layers)))
        for name, numel in _rank_tensors(unit, tp_size).items()
    ]
    tensors += [numel * element_bytes for numel in _tower_tensors(model.tower_parameters(), tp_size)]
    if model.has_whole_embedding:
        # In addition to the part counted above.
        tensors.append(model.vocab_size * model.hidden_size * (tp_size - 1) // tp_size * element_bytes)
    # The rotary tables, in float32.
    rotated = {layer.head_dim for layer in model.cached_layers} if model.latent is None else {model.latent.rope_dim}
    tensors.append(model.context_length * sum(rotated) * 4)
    return arena_bytes(tuple(tensors), device=device)


def _engine_layer(model: ModelShape, index: int, tp_size: int) -> Shapes:
    """A layer's parameters in SGLang: a key-value head that cannot be split is replicated, and unused keys and values have rows, too."""
    layer = model.at(index)
    repeats = max(1, tp_size // layer.num_kv_heads)
    return replace(layer, num_kv_heads=layer.num_kv_heads * repeats, has_own_keys=True, has_value_projection=True).layer(index)


def kv_bytes_per_token(node: Node) -> int:
    """What one rank caches of one token in all layers with attention: keys and values, or the vector that they are projected from."""
    return sum(_cached(node))


def _cached(node: Node) -> list[int]:
    """Bytes per token of each buffer of the cache."""
    if node.model.latent is not None:
        return [node.model.latent.cached_size * node.engine_bytes] * node.model.num_layers
    return [
        max(1, layer.num_kv_heads // node.tp_size) * layer.head_dim * node.engine_bytes
        for layer in node.model.cached_layers
        for _ in ("keys", "values")
    ]


def state_buffers(node: Node) -> list[int]:
    """Sizes of one rank's states of gated delta nets, over layers: latest inputs of convolutions, and float32 states; or empty."""
    delta = node.model.delta
    if delta is None:
        return []
    # SGLang has one more slot, for padding.
    each = (state_slots(node.config) + 1) * len(delta.layers)
    inputs = delta.conv_size // node.tp_size * (delta.kernel_size - 1) * node.engine_bytes
    return [each * inputs, each * 4 * delta.value_size // node.tp_size * delta.key_head_dim]


def kv_pool(node: Node, *, taken_bytes: int) -> KvPool:
    """SGLang's cache at start: kv_ratio of the memory then free, minus the weights; at most kv_tokens.

    taken_bytes: used by others and by contexts on the GPU at that time.
    """
    each = kv_bytes_per_token(node)
    most = node.kv_tokens
    if node.device == "cpu":
        most = max(CPU_TOKENS, node.longest_sequence) if most is None else most
        buffers = ((most + _CONTEXT_SLACK + 1) * each for each in _cached(node))
        # SGLang's table of every request's slots.
        table = (running_requests(node.config) + 1) * (node.longest_sequence + _CONTEXT_SLACK + 4) * 4
        return KvPool(most, arena_bytes((table, *state_buffers(node), *buffers), device=node.device))
    states = sum(state_buffers(node))
    pool = int((node.gpu_bytes - taken_bytes) * node.config.rollout.kv_ratio) - engine_weights(node) - states
    num_tokens = max(0, pool) // each
    if most is not None:
        num_tokens = min(num_tokens, most)
    return KvPool(num_tokens, num_tokens * each + states)


def host_routes(node: Node, pool: KvPool) -> int:
    """Experts of the cache's tokens, which a rank keeps in host memory, pinned on a GPU, with trainer.router_replay."""
    routes = RouteShape.of(node.model) if replays_routes(node.config, node.model) else None
    return 0 if routes is None else (pool.num_tokens + _CONTEXT_SLACK + 1) * routes.token_bytes


def cuda_graphs(node: Node) -> int:
    """Logits and one layer's activations of the largest batch, and a fixed part. Fitted to 7B on an H200 at 256 and 544 requests."""
    engine = node.config.rollout.engine
    if node.device == "cpu" or engine.get("disable_cuda_graph") is True:
        return 0
    model = node.model
    logits = 4 * model.vocab_size * (1 if node.tp_size == 1 else 2)
    layer = 3 * -(-model.intermediate_size // node.tp_size) * node.engine_bytes
    num_tokens = (graph_requests(node.config) or SGLANG_GRAPH_REQUESTS) * max(1, draft_tokens(engine))
    return max(_CUDA_GRAPHS, _GRAPHS + num_tokens * (logits + layer))


def engine_step(node: Node) -> int:
    """Working memory of a full prefill and of sampling, outside SGLang's fraction. Fitted to H200s (docs/reference/plan.md)."""
    if node.device == "cpu":
        return 0
    model = node.model
    width = 4 * model.hidden_size + 3 * -(-max(model.intermediate_size, model.query_size) // node.tp_size)
    # Logits in float32 and a copy of them. Verification of drafts has its own blocks (rollout/sglang/scheduler.py).
    drafts = draft_tokens(node.config.rollout.engine)
    copies = DRAFT_BLOCKS * drafts if drafts else 2
    sampling = running_requests(node.config) * model.vocab_size * 4 * copies
    return _PREFILL_TOKENS * width * node.engine_bytes + sampling + _tower_step(node)


def _tower_step(node: Node) -> int:
    """The tower's working memory for a prefill of image tokens alone, their embeddings, and those that SGLang caches. Not measured yet."""
    tower = node.model.tower
    if tower is None:
        return 0
    per_patch = 4 * tower.hidden_size + 2 * -(-max(3 * tower.hidden_size, tower.intermediate_size) // node.tp_size)
    embedded = (1 + len(tower.deepstack)) * tower.out_size
    return _PREFILL_TOKENS * (tower.merge_size**2 * per_patch + embedded) * node.engine_bytes + _CACHED_EMBEDDINGS


def _tower_tensors(tower: Shapes, tp_size: int) -> list[int]:
    """Elements of a rank's parameters of a vision tower: linear layers are split, biases of those by columns are whole."""
    whole = ("patch_embed.proj.weight", ".proj.bias", "linear_fc2.bias", "down_proj.bias", "mlp.2.bias", "ln_q.weight")
    return [
        math.prod(shape) if "norm" in name or name.endswith(whole) else -(-math.prod(shape) // tp_size)
        for name, shape in ((name, _padded(name, shape)) for name, shape in tower.items())
    ]


def _padded(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in SGLang of a parameter of a vision tower."""
    if "pos_embed" in name:
        return -(-shape[0] // VOCABULARY_STEP) * VOCABULARY_STEP, *shape[1:]
    if "gate_proj" in name or "up_proj" in name:
        return -(-shape[0] // _GATED_STEP) * _GATED_STEP, *shape[1:]
    return (shape[0], -(-shape[1] // _GATED_STEP) * _GATED_STEP) if "down_proj.weight" in name else shape


def _rank_tensors(unit: Shapes, tp_size: int) -> dict[str, int]:
    """Elements of a rank's parameters in one unit: SGLang fuses q, k and v, the first projections of latent attention, and gate and up."""
    joined: dict[str, int] = {}
    for name, shape in unit.items():
        is_whole = "norm" in name or name.startswith(ROUTERS) or name.endswith(_WHOLE)
        numel = math.prod(shape) if is_whole else -(-math.prod(shape) // tp_size)
        if name in ("embed_tokens.weight", "lm_head.weight"):
            rows = -(-shape[0] // VOCABULARY_STEP) * VOCABULARY_STEP
            numel = -(-rows // tp_size) * shape[1]
        for part, fused in _FUSED.items():
            name = name.replace(f".{part}.", f".{fused}.")
        joined[name] = joined.get(name, 0) + numel
    return joined
