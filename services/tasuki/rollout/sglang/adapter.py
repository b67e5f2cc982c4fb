"""SGLang's LoRA with one adapter, whose buffers a sync overwrites in place like weights.

For each module of each layer a rank has a buffer for A [parts * rank, in] and one for B [out, rank]. Parts are the checkpoint layers
that SGLang fuses, in qkv_proj and gate_up_proj; in and out are sizes of the rank's slice. On a CPU, SGLang pads heads and
intermediate sizes that do not divide evenly: a slice may then be smaller than its buffer, or empty, and the rest is zeros.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.lora_registry import register_lora_backend
from sglang.srt.lora.layers import ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tasuki.config.trainer_schema import LoraConfig
from tasuki.rollout.arguments import ADAPTER_ID, LORA_BACKEND
from tasuki.rollout.record import Layout
from tasuki.wire.errors import BadHandle, InternalError, UnsupportedModel

SLOT = 1
"""Slot of the adapter in SGLang's buffers; slot 0 belongs to requests without one, which tasuki never makes."""
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_HEADS, _KV_HEADS = (
    ("num_attention_heads", "original_num_attention_heads"),
    ("num_key_value_heads", "original_total_num_kv_heads"),
)
# Keys in SGLang's configuration for a layer's split dimension: the padded size, and the checkpoint's size if it was recorded.
_COUNTS = {"q_proj": _HEADS, "k_proj": _KV_HEADS, "v_proj": _KV_HEADS, "o_proj": _HEADS}
_MLP_COUNTS = ("intermediate_size", "original_intermediate_size")


def serve_adapter(manager: LoRAManager, config: LoraConfig, *, tp_rank: int) -> "AdapterBuffers":
    """Loads the adapter into its permanent slot. It has no effect until received. Raises UnsupportedModel, see AdapterBuffers."""
    settings = {
        "peft_type": "LORA",
        "r": config.max_rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.targets),
    }
    ref = LoRARef(lora_id=ADAPTER_ID, lora_name=ADAPTER_ID, lora_path=ADAPTER_ID, pinned=True)
    result = manager.load_lora_adapter_from_tensors(ref, {}, settings)
    if not result.success:
        raise InternalError(f"SGLang refuses the adapter: {result.error_message}")
    manager.fetch_new_loras({ADAPTER_ID})
    if (slot := manager.memory_pool.get_buffer_id(ADAPTER_ID)) != SLOT:
        raise InternalError(f"SGLang keeps the adapter in slot {slot}; the kernels read slot {SLOT}")
    return AdapterBuffers(manager, config, tp_rank=tp_rank)


class AdapterBuffers:
    """One rank's slice of the adapter, for a copy plan: an EngineModel with buffers in place of parameters."""

    def __init__(self, manager: LoRAManager, config: LoraConfig, *, tp_rank: int) -> None:
        """Raises UnsupportedModel for a layer with an unsupported split, or whose buffers SGLang allocates in other sizes."""
        self._config = config
        self._modules = list(_modules(manager))
        """Name, module, and the adapter's slot of its A and B. Always the same tensors, since a plan refers to tensors."""
        self._places: list[_Place] = []
        self._unused: list[torch.Tensor] = []
        for name, module, a, b in self._modules:
            split = _split_of(name, module, manager.base_hf_config, tp_rank=tp_rank, tp_size=manager.attn_tp_size)
            _check_fit(name, split, a, b, rank=config.max_rank, tp_size=manager.attn_tp_size)
            self._note_places(name, split, a, b)

    def _note_places(self, name: str, split: "_Split", a: torch.Tensor, b: torch.Tensor) -> None:
        most = self._config.max_rank
        for index, (part, output) in enumerate(split.outputs.items()):
            layer = f"{name.rpartition('.')[0]}.{part}"
            rank = self._config.rank_of(layer) if self._config.adapts(layer) else 0
            to_a, to_b = a[index * most : (index + 1) * most], b.narrow(0, output.row, output.size)
            self._unused += [unused for unused in (to_a[rank:], to_b[:, rank:]) if unused.numel()]
            if rank:
                of_a, of_b = (rank, split.input.whole), (output.whole, rank)
                self._places.append(_Place(f"{layer}.lora_A.weight", to_a[:rank], 1, split.input.start, of_a))
                self._places.append(_Place(f"{layer}.lora_B.weight", to_b[:, :rank], 0, output.start, of_b))

    def layout(self, dtype: torch.dtype) -> Layout:
        """Every A and B, as they are published in `dtype`."""
        return {place.name: (place.shape, dtype) for place in self._places}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, _, a, b in self._modules:
            yield f"{name}.lora_A", cast(torch.nn.Parameter, a)
            yield f"{name}.lora_B", cast(torch.nn.Parameter, b)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the rank's slices of `<layer>.lora_A.weight` and `<layer>.lora_B.weight`. Layers without an adapter get zeros.

        Raises BadHandle for a tensor whose shape differs from the engine's layer.
        """
        given = dict(weights)
        for buffer in self._unused:
            buffer.zero_()
        for place in self._places:
            # The plan's coverage check names what is missing.
            if (whole := given.get(place.name)) is not None:
                place.load(whole)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the slice from `start` of `dim` of a published tensor of `shape` goes, up to the tensor's end."""

    name: str
    to: torch.Tensor
    dim: int
    start: int
    shape: tuple[int, int]

    def load(self, whole: torch.Tensor) -> None:
        if tuple(whole.shape) != self.shape:
            raise BadHandle(
                f"{self.name} is published as {tuple(whole.shape)}; the engine's has {self.shape}", tensor=self.name
            )
        size = self.to.shape[self.dim]
        length = min(max(self.shape[self.dim] - self.start, 0), size)
        if length:
            self.to.narrow(self.dim, 0, length).copy_(whole.narrow(self.dim, self.start, length))
        if length < size:
            self.to.narrow(self.dim, length, size - length).zero_()


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's share of one dimension of a layer: `size` from `start` of the `whole`, with padding, at `row` of the rank's own."""

    whole: int
    start: int
    size: int
    row: int = 0


@dataclass(frozen=True, slots=True)
class _Split:
    """Split of a module: its input, and the outputs of its parts by name."""

    input: _Share
    outputs: Mapping[str, _Share]


def _split_of(name: str, module: Any, config: Any, *, tp_rank: int, tp_size: int) -> _Split:
    """Dimension that ranks split, by kind of module: the input of a row-parallel layer and the outputs of a column-parallel one."""
    layer, kind = module.base_layer, name.rpartition(".")[2]
    if isinstance(module, RowParallelLinearWithLoRA):
        size = layer.input_size_per_partition
        whole = _unpadded(layer.input_size, config, kind)
        return _Split(_Share(whole, tp_rank * size, size), {kind: _Share(layer.output_size, 0, layer.output_size)})
    if not isinstance(module, ColumnParallelLinearWithLoRA):
        raise UnsupportedModel(
            f'{name} is a {type(layer).__name__}, which rollout.lora = "adapter" cannot serve; use "merged"', module=name
        )
    outputs: dict[str, _Share] = {}
    row = 0
    for index, part in enumerate(_PARTS.get(kind, (kind,))):
        size = layer.output_partition_sizes[index]
        # There may be fewer key-value heads than ranks; several ranks then hold the same heads.
        copies = layer.num_kv_head_replicas if part in ("k_proj", "v_proj") else 1
        whole = _unpadded(size * tp_size // copies, config, part)
        outputs[part] = _Share(whole, tp_rank // copies * size, size, row)
        row += size
    return _Split(_Share(layer.input_size, 0, layer.input_size), outputs)


def _unpadded(size: int, config: Any, part: str) -> int:
    """The checkpoint's size of a split dimension whose padded size is `size`."""
    counted, original = _COUNTS.get(part, _MLP_COUNTS)
    count = getattr(config, counted)
    return size * getattr(config, original, count) // count


def _check_fit(name: str, split: _Split, a: torch.Tensor, b: torch.Tensor, *, rank: int, tp_size: int) -> None:
    needed = (len(split.outputs) * rank, split.input.size), (sum(output.size for output in split.outputs.values()), rank)
    made = tuple(a.shape), tuple(b.shape)
    if made != needed:
        raise UnsupportedModel(
            f"{name}: SGLang allocates LoRA buffers of {made} for a layer that needs {needed} at rollout.tp_size = {tp_size}; "
            'use another rollout.tp_size, or rollout.lora = "merged"',
            module=name,
            tp_size=tp_size,
        )


def _modules(manager: LoRAManager) -> Iterator[tuple[str, Any, torch.Tensor, torch.Tensor]]:
    pool = manager.memory_pool
    slot = pool.get_buffer_id(ADAPTER_ID)
    for layer, modules in enumerate(manager.lora_modules):
        for name, module in modules.items():
            kind = name.rpartition(".")[2]
            yield name, module, pool.A_buffer[kind][layer][slot], pool.B_buffer[kind][layer][slot]


def parts_of(module: str) -> tuple[str, ...]:
    """The checkpoint's layers that SGLang computes in this module."""
    prefix, _, kind = module.rpartition(".")
    return tuple(f"{prefix}.{part}" for part in _PARTS.get(kind, (kind,)))


def install_dense_lora(config: LoraConfig) -> None:
    """Lets SGLang find these kernels by the name LORA_BACKEND."""
    register_lora_backend(LORA_BACKEND)(lambda: partial(DenseLora, config=config))


class DenseLora(BaseLoRABackend):
    """LoRA kernels of an engine that applies one adapter to every token: plain matrix products, by SGLang's interface.

    SGLang's kernels look up each token's adapter among several. With a single one, A and B are ordinary matrices, and the product with B
    adds to the layer's output in place. Nothing depends on the batch, so CUDA graphs need no data of it. T tokens, rank r; `weights` and
    buffers have a slot as their first dimension.
    """

    name = LORA_BACKEND

    def __init__(self, max_loras_per_batch: int, device: torch.device, *, config: LoraConfig, **_: object) -> None:
        super().__init__(max_loras_per_batch, device)
        self._config, self._scales = config, tuple[float, ...]()
        self.batch_info: Any = SimpleNamespace()
        """SGLang sets attributes of it."""

    def of_parts(self, layers: Sequence[str]) -> "DenseLora":
        """The kernels of a module that computes these layers of the checkpoint."""
        made = copy(self)
        made._scales = tuple(map(self._config.scaling_of, layers))
        return made

    def prepare_lora_batch(self, *_: object, **__: object) -> None:
        """Does nothing: there is nothing to prepare."""

    def run_lora_a_sgemm(self, x: Tensor, weights: Tensor, *_: object, **__: object) -> Tensor:
        """[T, in] times A of one or several parts, [parts * r, in]."""
        return x @ weights[SLOT].T

    def run_lora_b_sgemm(self, x: Tensor, weights: Tensor, *_: object, base_output: Tensor, **__: object) -> Tensor:
        """Adds B [out, r] times [T, r] to [T, out]."""
        return base_output.addmm_(x, weights[SLOT].T, alpha=self._scales[0])

    def run_qkv_lora(
        self, x: Tensor, qkv_lora_a: Tensor, qkv_lora_b: Tensor, *, output_offset_cpu: Tensor, base_output: Tensor, **_: object
    ) -> Tensor:
        return self._add_parts(x, qkv_lora_a, qkv_lora_b, output_offset_cpu.tolist(), base_output)

    def run_gate_up_lora(
        self,
        x: Tensor,
        gate_up_lora_a: Tensor,
        gate_up_lora_b: Tensor,
        *,
        output_offset_cpu: Tensor,
        base_output: Tensor,
        **_: object,
    ) -> Tensor:
        return self._add_parts(x, gate_up_lora_a, gate_up_lora_b, output_offset_cpu.tolist(), base_output)

    def _add_parts(self, x: Tensor, a: Tensor, b: Tensor, ends: Sequence[int], base_output: Tensor) -> Tensor:
        """ends: the row of B at which each part begins, and the last one's end."""
        inner, rank, whole = self.run_lora_a_sgemm(x, a), b.shape[-1], b[SLOT]
        for index, (start, end) in enumerate(pairwise(ends)):
            part = inner[:, index * rank : (index + 1) * rank]
            base_output[:, start:end].addmm_(part, whole[start:end].T, alpha=self._scales[index])
        return base_output


class ScaledLora(LoRAManager):
    """SGLang's manager, with the scaling of each layer."""

    def set_lora_module(self, module_name: str, module: torch.nn.Module) -> Any:
        made: Any = super().set_lora_module(module_name, module)
        made.lora_backend = cast(DenseLora, self.lora_backend).of_parts(parts_of(module_name))
        return made


class UnpinnedLora(ScaledLora):
    """The same on a CPU, without pinned memory, which torch refuses without a GPU."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _Unpinned():
            super().__init__(*args, **options)


class _Unpinned(TorchFunctionMode):
    """Creates tensors without pinning."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})
