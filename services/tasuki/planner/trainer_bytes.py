"""Bytes of one FSDP2 rank that stay through a step: weights, gradients, optimizer state, and what is published."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from tasuki.config.trainer_schema import LoraConfig
from tasuki.memory.granularity import ALIGNMENT, CPU_MIN_TENSOR, arena_bytes, export_bytes, rounded_up
from tasuki.models.adapter_folder import FUSED
from tasuki.models.images import MAX_FILE_PIXELS, MAX_PATCH_BYTES
from tasuki.models.shape import EXPERTS, SPLIT_BY_COLUMNS, ModelShape
from tasuki.planner.kv_tokens import longest_sample
from tasuki.planner.node import Node, Part
from tasuki.wire.errors import InvalidArgument

Bytes = dict[Part, int]
_Shapes = tuple[tuple[int, ...], ...]
_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 32
_SCALE_BYTES = 4
_HALF_BYTES = 2
_DECODED_BYTES = 22
"""Of a pixel while a file is decoded and cut into patches: at most, in WebP. Measured."""


def trainer_tags(node: Node) -> Bytes:
    """Weights, gradients and optimizer state of rank 0, which has the most: of the policy and, if there is one, the critic."""
    networks = [_kept_tensors(network) for network in node.networks()]
    weights, trained = ([size for network in networks for size in network[which]] for which in (0, 1))
    if node.has_reference and not node.config.reference_is_on_host:
        weights += _frozen_shards(node)
    return {
        Part.TRAINER_WEIGHTS: arena_bytes(tuple(weights), device=node.device),
        Part.GRADIENTS: arena_bytes(tuple(trained), device=node.device),
        Part.OPTIMIZER: 0 if node.trainer.optimizer_on_host else arena_bytes(tuple(_moments(node)), device=node.device),
    }


def frozen_bytes(node: Node) -> int:
    """Bytes of rank 0's weights that no step changes: bases of adapters, vision towers, and a reference. Without an arena's rounding."""
    frozen = [network for network in node.networks() if network.lora is not None and not network.shares_base]
    if node.has_reference and not node.config.reference_is_on_host:
        frozen.append(node)
    whole = [network for network in node.networks() if network.lora is None and not node.trainer.train_tower]
    towers = [_tower_shards(network.model, network.num_ranks) for network in whole]
    return sum(size for network in frozen for size in _frozen_shards(network)) + sum(
        size for tower in towers for size in _sizes(tower, node.param_bytes)
    )


def gradient_bytes(node: Node) -> int:
    """Gradients that rank 0 steps, of all trained networks, without an arena's rounding."""
    return sum(size for network in node.networks() for size in _sizes(trained_shards(network), node.param_bytes))


def checkpoint_bytes(node: Node) -> int:
    """A checkpoint: trained weights and optimizer state of all networks and ranks."""
    return node.num_ranks * (gradient_bytes(node) + sum(_moments(node)))


def run_disk(node: Node) -> tuple[int, int]:
    """Most checkpoints of the node's run at a time, while the best is old and one is written; and bytes of them and the exported model."""
    run = node.config.train or node.config.sft
    if run is None:
        return 0, 0
    most = run.keep_last + 2
    if run.save_every is None or run.num_steps is not None:
        most = 0 if run.save_every is None else min(most, (run.num_steps or 0) // run.save_every)
    return most, most * checkpoint_bytes(node) + node.exported_bytes


def host_moments(node: Node) -> int:
    """Host memory of one rank for optimizer state that stays there."""
    return sum(rounded_up(size, ALIGNMENT) for size in _moments(node)) if node.trainer.optimizer_on_host else 0


def host_reference(node: Node) -> int:
    """Host memory of one rank for a reference that stays there. Scoring with it takes less of a GPU than a step."""
    if not (node.has_reference and node.config.reference_is_on_host):
        return 0
    return sum(rounded_up(size, ALIGNMENT) for size in _frozen_shards(node))


def host_images(node: Node) -> int:
    """Host memory of all processes for images: of files that are decoded, and copies of the patches of a step, or else a call."""
    if node.model.tower is None:
        return 0
    channels, _, rows, columns = node.model.tower.patch_shape
    train, sft, num_prompts, num_tokens = node.config.train, node.config.sft, math.inf, longest_sample(node.config)
    if train is not None:
        num_prompts = math.ceil(train.prompts_per_step * train.oversample)
    elif sft is not None:
        num_prompts = sft.samples_per_step
        num_tokens = min(sft.max_tokens or node.micro_batch_tokens, node.longest_sequence)
    num_patches = num_prompts * (num_tokens or node.longest_sequence) * node.model.tower.merge_size**2
    size = int(min(MAX_PATCH_BYTES, num_patches * channels * rows * columns))
    run = train or sft
    num_steps = None if run is None or run.eval_dataset is not None else run.num_steps
    kept = MAX_PATCH_BYTES if num_steps is None else min(MAX_PATCH_BYTES, size * num_steps)
    # Both fronts keep those of earlier steps, too. In training the front has 3 copies and 2 for each rank, which has 2; in rollout a
    # message has 2, as each rank.
    copies = 3 + max(4 * node.num_ranks, 2 * node.config.num_engine_ranks)
    return 2 * kept + size * copies + MAX_FILE_PIXELS * _DECODED_BYTES


def _moments(node: Node) -> list[int]:
    """Sizes of AdamW's state tensors, of all trained networks."""
    shapes = [trained_shards(network) for network in node.networks()]
    return list(chain.from_iterable(_moment_sizes(each, node.param_bytes, node.trainer.optimizer_8bit) for each in shapes))


@lru_cache
def _moment_sizes(shapes: _Shapes, element_bytes: int, is_8bit: bool) -> tuple[int, ...]:
    return tuple(size for shape in shapes for size in moment_bytes(shape, element_bytes=element_bytes, is_8bit=is_8bit))


def _kept_tensors(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of a network's shards, and of those that are trained."""
    if node.trainer.backend == "megatron":
        return _kept_parts(node)
    trained = _sizes(trained_shards(node), node.param_bytes)
    if node.lora is not None:
        return (() if node.shares_base else _frozen_shards(node)) + trained, trained
    # `to_empty` allocates a tied tensor once per name; torch keeps the first allocation in the tag's pool.
    twice = trained[:1] if node.model.is_tied and node.device == "cuda" else ()
    return _sizes(shards(node), node.param_bytes) + twice, trained


def _frozen_shards(node: Node) -> tuple[int, ...]:
    if node.trainer.backend == "megatron":
        return _sizes(layer_parts(node.model, node.trainer.tensor_parallel, node.trainer.expert_ranks), node.compute_bytes)
    return _sizes(shards(node), node.compute_bytes)


@lru_cache  # a search sums the same shards a hundred times
def _sizes(shapes: _Shapes, element_bytes: int) -> tuple[int, ...]:
    return tuple(math.prod(shape) * element_bytes for shape in shapes)


def export_arena(node: Node) -> int:
    """Copies of rank 0's weights for the engine, or 0 where it reads them in place."""
    if node.exports_parameters:
        # On a CPU, tensors too small for the arena of the weights are copied, in whole chunks.
        small = [size for size in _sizes(shards(node), node.engine_bytes) if size < CPU_MIN_TENSOR]
        num_bytes = sum(rounded_up(size, ALIGNMENT) for size in small)
        return export_bytes(num_bytes, device=node.device) if node.device == "cpu" and num_bytes else 0
    published = shards(node) if node.config.served_adapter is None else trained_shards(node)
    num_bytes = sum(rounded_up(size, ALIGNMENT) for size in _sizes(published, node.engine_bytes))
    return export_bytes(num_bytes, device=node.device)


def shards(node: Node) -> _Shapes:
    """Rank 0's part of every parameter, in order of creation. FSDP2 splits dim 0 and pads all ranks alike."""
    if node.trainer.backend == "megatron":
        return _stepped(layer_parts(node.model, node.trainer.tensor_parallel, node.trainer.expert_ranks), node)
    return _shards(node.model, node.num_ranks) + _tower_shards(node.model, node.num_ranks)


@lru_cache
def layer_parts(model: ModelShape, tensor_parallel: int, expert_ranks: int) -> _Shapes:
    """A rank's part of every parameter: all of norms and routers. Which dimension is split does not matter here."""

    def num_parts(name: str, shape: tuple[int, ...]) -> int:
        if name.endswith(EXPERTS):
            return expert_ranks
        is_whole = name.endswith("mlp.gate.weight") or (len(shape) == 1 and name.endswith(".weight"))
        return 1 if is_whole else tensor_parallel

    return tuple(_rows(shape, num_parts(name, shape)) for name, shape in model.parameters().items())


def _stepped(parts: _Shapes, node: Node) -> _Shapes:
    """Rows of these parts that rank 0 steps: of experts one after another, over the ranks that have the same ones."""
    return tuple(_rows(shape, num_ranks) for shape, num_ranks in _by_rows(parts, node))


def _buffers(parts: _Shapes, node: Node) -> _Shapes:
    """These parts with as many rows for each of the ranks that step them."""
    return tuple((num_ranks * -(-rows // num_ranks), *others) for (rows, *others), num_ranks in _by_rows(parts, node))


def _by_rows(parts: _Shapes, node: Node) -> Iterator[tuple[tuple[int, ...], int]]:
    """Parts with the rows of experts one after another, and how many ranks have the same ones."""
    for shape in parts:
        if len(shape) == len("EOI"):
            yield (shape[0] * shape[1], shape[2]), node.num_ranks // node.trainer.expert_ranks
        else:
            yield shape, node.num_ranks // node.trainer.tensor_parallel


def _rows(shape: tuple[int, ...], num_parts: int) -> tuple[int, ...]:
    return (-(-shape[0] // num_parts), *shape[1:])


@lru_cache
def adapter_parts(model: ModelShape, tensor_parallel: int, expert_ranks: int, lora: LoraConfig) -> _Shapes:
    """The same of every adapter: of A or B each rank has all. Those that megatron-core's layers share come once."""
    shapes: list[tuple[int, ...]] = []
    for layer, (rows, columns) in lora.layers(model).items():
        rank, is_row = lora.rank_of(layer), f"{layer}.weight".endswith(SPLIT_BY_COLUMNS)
        rows, columns = (rows, columns // tensor_parallel) if is_row else (rows // tensor_parallel, columns)
        is_tied = lora.is_fused and any(layer.endswith(parts[1:]) for parts in FUSED.values())
        shapes += [*([] if is_tied else [(rank, columns)]), (rows, rank), *([(rows,)] if lora.use_dora else [])]
    return tuple(shapes) + (_expert_adapter_shards(model, expert_ranks, lora.rank) if lora.experts else ())


def _kept_parts(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As _kept_tensors, of the megatron-core backend: whole parts in compute dtype and their gradients, and the rows that a rank steps."""
    layout = node.trainer.tensor_parallel, node.trainer.expert_ranks
    frozen, trained = _Shapes(), layer_parts(node.model, *layout)
    if node.lora is not None:
        frozen, trained = trained, adapter_parts(node.model, *layout, node.lora)
    stepped = () if node.param_bytes == node.compute_bytes else _sizes(trained_shards(node), node.param_bytes)
    gradients = _buffers(trained, node)
    return _sizes(_buffers(frozen, node) + gradients, node.compute_bytes) + stepped, _sizes(gradients, node.param_bytes)


@lru_cache
def _tower_shards(model: ModelShape, num_ranks: int) -> _Shapes:
    return tuple((-(-shape[0] // num_ranks), *shape[1:]) for shape in model.tower_parameters().values())


@lru_cache
def _shards(model: ModelShape, num_ranks: int) -> _Shapes:
    root, *layers = model.units()
    embedding, *others = root.values()
    shapes = chain([embedding], *(layer.values() for layer in layers), others)
    return tuple((-(-shape[0] // num_ranks), *shape[1:]) for shape in shapes)


def trained_shards(node: Node) -> _Shapes:
    """Shards with gradients: all but a frozen vision tower's, or those of adapters."""
    if node.lora is None:
        return (
            shards(node)
            if node.trainer.train_tower or node.trainer.backend == "megatron"
            else _shards(node.model, node.num_ranks)
        )
    if node.trainer.backend == "megatron":
        return _stepped(adapter_parts(node.model, node.trainer.tensor_parallel, node.trainer.expert_ranks, node.lora), node)
    linear = _adapter_shards(node.model, node.num_ranks, node.lora)
    return linear + (_expert_adapter_shards(node.model, node.num_ranks, node.lora.rank) if node.lora.experts else ())


@lru_cache
def _adapter_shards(model: ModelShape, num_ranks: int, lora: LoraConfig) -> _Shapes:
    shapes: list[tuple[int, ...]] = []
    for layer, (rows, columns) in lora.layers(model).items():
        rank, own_rows = lora.rank_of(layer), -(-rows // num_ranks)
        magnitudes = [(own_rows,)] if lora.use_dora else []
        shapes += [(-(-rank // num_ranks), columns), (own_rows, rank), *magnitudes]
    return tuple(shapes)


@lru_cache
def _expert_adapter_shards(model: ModelShape, num_ranks: int, rank: int) -> _Shapes:
    layers = [model.layer(index) for index in filter(model.is_sparse, range(model.num_layers))]
    matrices = [(-(-shape[0] // num_ranks), *shape[1:]) for layer in layers for name, shape in layer.items() if name in EXPERTS]
    pairs = (((experts, rank, columns), (experts, rows, rank)) for experts, rows, columns in matrices)
    return tuple(chain.from_iterable(pairs))


def moment_block(shape: Sequence[int]) -> int | None:
    """Elements of a row that share one scale in 8 bits, for a parameter of this shape; None if its moments are not quantized.

    That is the case for vectors and for matrices whose rows are not divisible by a block of 32.
    """
    if len(shape) < 2 or shape[0] == 1:
        return None
    block = math.gcd(shape[-1], _LARGEST_BLOCK)
    return block if block >= _SMALLEST_BLOCK else None


def moment_bytes(shape: Sequence[int], *, element_bytes: int, is_8bit: bool) -> list[int]:
    """Sizes of the tensors that hold both moments of a shard. element_bytes: of an unquantized element."""
    block, num_elements = moment_block(shape) if is_8bit else None, math.prod(shape)
    if block is None:
        return [num_elements * element_bytes] * 2
    return [num_elements, num_elements // block * _SCALE_BYTES] * 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of an optimizer step in each direction through one node's network cards. The first layout is the present one."""

    layout: str
    num_bytes: int


def node_traffic(node: Node, *, num_nodes: int) -> Sequence[Traffic]:
    """Traffic of a fleet of `num_nodes` such nodes; empty for one. Raises InvalidArgument for less than one.

    Source: over R nodes, a ring all-reduce sends 2 (R - 1) / R of the bytes through each node.
    """
    if num_nodes < 1:
        raise InvalidArgument("nodes", f"{num_nodes} must be at least 1")
    if num_nodes == 1:
        return ()
    crossing = 2 * (num_nodes - 1) / num_nodes * gradient_bytes(node) * node.num_ranks
    rows = [Traffic("HSDP", round(crossing))]
    if node.lora is None and node.param_bytes > _HALF_BYTES:
        halved = round(crossing * _HALF_BYTES / node.param_bytes)
        rows.append(Traffic('HSDP with trainer.param_dtype = "bfloat16"', halved))
    return rows
