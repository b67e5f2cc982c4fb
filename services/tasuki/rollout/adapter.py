"""SGLang's LoRA as one adapter whose buffers a sync overwrites in place, as it overwrites weights.

For each module of each layer a rank has a buffer for A [parts * rank, in] and one for B [out, rank]. Parts are the checkpoint's layers that
SGLang runs as one, in qkv_proj and gate_up_proj; in and out are those of the rank's slice of the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from torch.overrides import TorchFunctionMode

from tasuki.config.schema import LoraConfig
from tasuki.rollout.arguments import ADAPTER_ID
from tasuki.wire.errors import InternalError

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def serve_adapter(manager: LoRAManager, config: LoraConfig, *, tp_rank: int) -> AdapterBuffers:
    """Gives the adapter its slot for good. It changes nothing until it is received."""
    settings = {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.target_modules),
    }
    ref = LoRARef(lora_id=ADAPTER_ID, lora_name=ADAPTER_ID, lora_path=ADAPTER_ID, pinned=True)
    result = manager.load_lora_adapter_from_tensors(ref, {}, settings)
    if not result.success:
        raise InternalError(f"SGLang refuses the adapter: {result.error_message}")
    manager.fetch_new_loras({ADAPTER_ID})
    return AdapterBuffers(manager, config, tp_rank=tp_rank)


class AdapterBuffers:
    """One rank's slice of the adapter, for a copy plan: what an EngineModel has, with buffers in the place of parameters."""

    def __init__(self, manager: LoRAManager, config: LoraConfig, *, tp_rank: int) -> None:
        self._config, self._tp_rank = config, tp_rank
        self._modules = list(_modules(manager))
        """Name, module, and the adapter's slot of its A and B; the same tensors at every look, since a plan is for tensors."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, _, a, b in self._modules:
            yield f"{name}.lora_A", cast(torch.nn.Parameter, a)
            yield f"{name}.lora_B", cast(torch.nn.Parameter, b)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the rank's slices of `<layer>.lora_A.weight` and `<layer>.lora_B.weight`; layers without an adapter get zeros."""
        given = dict(weights)
        for name, module, a, b in self._modules:
            prefix, _, kind = name.rpartition(".")
            rows = module.output_offset.tolist()
            for index, part in enumerate(_PARTS.get(kind, (kind,))):
                to_a = a[index * self._config.rank : (index + 1) * self._config.rank]
                to_b = b[rows[index] : rows[index + 1]]
                if part not in self._config.target_modules:
                    to_a.zero_()
                    to_b.zero_()
                    continue
                # Key-value heads may be fewer than ranks; then several ranks hold the same.
                is_shared = part in ("k_proj", "v_proj")
                rank = self._tp_rank // module.base_layer.num_kv_head_replicas if is_shared else self._tp_rank
                for to, dim, factor in ((to_a, 1, "lora_A"), (to_b, 0, "lora_B")):
                    # What nobody gives the plan's coverage will name.
                    if (whole := given.get(f"{prefix}.{part}.{factor}.weight")) is not None:
                        to.copy_(_slice_of(whole, dim, rank, size=to.shape[dim]))


def _modules(manager: LoRAManager) -> Iterator[tuple[str, Any, torch.Tensor, torch.Tensor]]:
    pool = manager.memory_pool
    slot = pool.get_buffer_id(ADAPTER_ID)
    for layer, modules in enumerate(manager.lora_modules):
        for name, module in modules.items():
            kind = name.rpartition(".")[2]
            yield name, module, pool.A_buffer[kind][layer][slot], pool.B_buffer[kind][layer][slot]


def _slice_of(whole: torch.Tensor, dim: int, rank: int, *, size: int) -> torch.Tensor:
    """The rank's part along `dim`; all where ranks do not share that dimension."""
    return whole if whole.shape[dim] == size else whole.narrow(dim, rank * size, size)


class UnpinnedLora(LoRAManager):
    """SGLang's manager on a CPU, where it would pin memory for a GPU that is not there, which torch refuses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with _Unpinned():
            super().__init__(*args, **options)

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        with _Unpinned():
            super().prepare_lora_batch(forward_batch)


class _Unpinned(TorchFunctionMode):
    """Makes tensors as they are made without pinning."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})
