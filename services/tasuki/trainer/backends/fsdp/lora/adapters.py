"""LoRA with PEFT: adapters on linear layers of a frozen model. An adapter adds the product B A, scaled.

PEFT renames parameters: `q_proj.weight` becomes `q_proj.base_layer.weight`, next to `q_proj.lora_A.default.weight` [rank, in] and
`q_proj.lora_B.default.weight` [out, rank]. Only this module knows these names.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import linear

from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.adapter_folder import ADAPTER_FILE, stored_decoder
from tasuki.models.family import Family
from tasuki.models.known import find_family
from tasuki.models.shape import EXPERTS
from tasuki.trainer.adamw import local_part
from tasuki.trainer.modules.experts import GroupedExperts
from tasuki.trainer.modules.lora import (
    EXPERT_A,
    EXPERT_B,
    Dropout,
    adapt_experts,
    from_file,
    in_file,
    initial_a,
    peft_config,
    pissa,
    row_norms,
)

_BASE, _A, _B = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"
_MAGNITUDE = ".lora_magnitude_vector.default.weight"
_ADAPTERS = (_A, _B, EXPERT_A, EXPERT_B, _MAGNITUDE)


def adapter_names(weight: str) -> tuple[str, str, str]:
    """Names of A and B of an adapted weight, and of DoRA's magnitudes."""
    layer = weight.removesuffix(".weight")
    ends = (EXPERT_A, EXPERT_B) if weight.endswith(EXPERTS) else (_A, _B)
    return layer + ends[0], layer + ends[1], layer + _MAGNITUDE


def family_of(causal_lm: nn.Module) -> Family:
    """Family of a network, whose class alone may belong to several, and is renamed by FSDP."""
    return find_family(cast(Any, causal_lm).config.architectures[0])


def _decoder_of(causal_lm: nn.Module) -> str:
    return family_of(causal_lm).adapter_decoder(has_tower=hasattr(causal_lm, "visual"))


def add_adapters(causal_lm: nn.Module, config: LoraConfig) -> None:
    """Freezes the model and adds adapters, in float32 and uninitialized, to the layers that `config` names.

    The model must have these layers (config.lora_checks.check_lora_targets).
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    named = config.model_copy(update={"experts": False})
    inject_adapter_in_model(peft_config(named, has_tower=hasattr(causal_lm, "visual")), causal_lm)
    for index, module in enumerate(causal_lm.modules()):
        if config.dropout and isinstance(module, LoraLayer):
            module.lora_dropout["default"] = Dropout(config.dropout, index)
        if isinstance(module, LoraLayer) and (config.use_dora or (config.is_pissa and config.dropout)):
            module.lora_variant["default"] = cast(Any, Dora if config.use_dora else DroppedPissa)
        if config.experts and isinstance(module, GroupedExperts):
            adapt_experts(module, config)
    for _, param in trained_parameters(causal_lm):
        param.data = param.data.float()


@torch.no_grad()
def initialize_adapters(causal_lm: nn.Module, config: LoraConfig, *, seed: int) -> None:
    """Fills adapters from `config.path`, or so that the policy equals the loaded model. Independent of the number of ranks."""
    if config.path is not None:
        _load_adapters(causal_lm, config.path)
        return
    if config.is_pissa:
        _decompose(causal_lm, init=config.init, seed=seed)
    else:
        _draw_adapters(causal_lm, init=config.init, seed=seed)
    for adapter in adapted_parameters(causal_lm).values():
        if adapter.magnitude is not None:
            a, b = adapter.a.full_tensor(), adapter.b.to_local()
            adapter.magnitude.to_local().copy_(row_norms(adapter.base.to_local(), a, b, scaling=adapter.scaling))


def _decompose(causal_lm: nn.Module, *, init: str, seed: int) -> None:
    """Initializes PiSSA's A and B. Collective: each rank decomposes the whole weights of other layers."""
    weights = list(adapted_parameters(causal_lm).values())
    mesh = weights[0].base.device_mesh
    own = mesh.get_local_rank()
    for first in range(0, len(weights), mesh.size()):
        some = weights[first : first + mesh.size()]
        wholes = (weight.base.full_tensor() for weight in some)
        (mine,) = [whole for rank, whole in enumerate(wholes) if rank == own] or [None]
        for rank, weight in enumerate(some):
            factors: Sequence[Tensor] = [torch.empty(each.shape, device=each.device) for each in (weight.a, weight.b)]
            if mine is not None and rank == own:
                factors = pissa(mine, init=init, rank=len(weight.a) // 2, scaling=weight.scaling, seed=seed)
            for param, factor in zip((weight.a, weight.b), factors, strict=True):
                param.copy_(distribute_tensor(factor, mesh, param.placements, src_data_rank=rank))


def _draw_adapters(causal_lm: nn.Module, *, init: str, seed: int) -> None:
    """Initializes A as LoraConfig.init says and B to zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in causal_lm.named_parameters():
        if name.endswith((_A, EXPERT_A)):
            sharded = cast(DTensor, param)
            whole = initial_a(param.shape, init=init, generator=generator).to(param.device)
            # Every rank generates the whole tensor: nothing is sent.
            param.copy_(distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None))
        elif name.endswith((_B, EXPERT_B)):
            param.zero_()


def _load_adapters(causal_lm: nn.Module, folder: Path) -> None:
    """Reads the adapters from PEFT's folder, which config.checks has judged. Every rank reads the whole file: nothing is sent."""
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        decoder = stored_decoder(file.keys(), decoder=_decoder_of(causal_lm))
        for name, param in adapter_parameters(causal_lm):
            sharded = cast(DTensor, param)
            named, _ = in_file(name, torch.empty(param.shape, device="meta"), decoder=decoder)
            stored = file.get_tensor(named).to(param.device, param.dtype)
            whole = from_file(name, stored, param.shape)
            param.copy_(distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None))


def base_parameters(causal_lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own parameters under their original names, with or without adapters."""
    for name, param in causal_lm.named_parameters():
        if not name.endswith(_ADAPTERS):
            yield name.replace(f"{_BASE}.", "."), param


def adapter_parameters(causal_lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A and B of every adapter, named `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, and DoRA's magnitudes."""
    for name, param in causal_lm.named_parameters():
        if name.endswith(_ADAPTERS):
            yield name.replace(".default.", "."), param


@dataclass(frozen=True, slots=True)
class Adapter:
    """A sharded weight W [out, in] with A [rank, in], B [out, rank] and DoRA's magnitudes [out]; of experts with a dimension [E] before.

    They keep their memory for the life of the process.
    """

    name: str
    base: DTensor
    a: DTensor
    b: DTensor
    scaling: float
    magnitude: DTensor | None = None


def adapted_parameters(causal_lm: nn.Module) -> dict[str, Adapter]:
    """The adapter of every adapted weight, by its name; empty without adapters."""
    params = cast(dict[str, DTensor], {name: param.detach() for name, param in causal_lm.named_parameters()})
    found: dict[str, Adapter] = {}
    for name in params:
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            scaling = cast(Any, causal_lm.get_submodule(layer)).scaling["default"]
            factors = params[f"{layer}{_BASE}.weight"], params[name], params[layer + _B]
            found[f"{layer}.weight"] = Adapter(f"{layer}.weight", *factors, scaling, params.get(layer + _MAGNITUDE))
        elif name.endswith(EXPERT_A):
            weight = name.removesuffix(EXPERT_A)
            scaling = cast(Any, causal_lm.get_submodule(weight.rpartition(".")[0])).scaling
            found[weight] = Adapter(weight, params[weight], params[name], params[weight + EXPERT_B], scaling)
    return found


def trained_parameters(causal_lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trained parameters: only the adapters if there are any, otherwise all."""
    return ((name, param) for name, param in causal_lm.named_parameters() if param.requires_grad)


class FirstValues:
    """PiSSA's first values in this rank's shards, the last rows of A and columns of B, which no step changes."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], gradients: Sequence[Tensor]) -> None:
        """gradients: this rank's parts of the parameters' `.grad`."""
        pairs = list(zip(named, gradients, strict=True))
        self._values = [part for (name, param), _ in pairs for part in _first_values(name, param, local_part(param))]
        self._gradients = [part for (name, param), gradient in pairs for part in _first_values(name, param, gradient)]

    @torch.no_grad()
    def clear_gradients(self) -> None:
        for gradient in self._gradients:
            gradient.zero_()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Undoes what the block, a step with weight decay, does to them."""
        kept = [value.clone() for value in self._values]
        yield
        for value, before in zip(self._values, kept, strict=True):
            value.copy_(before)


def _first_values(name: str, param: nn.Parameter, local: Tensor) -> Iterator[Tensor]:
    if name.endswith(_A):
        sharded = cast(DTensor, param)
        _, (start, _) = compute_local_shape_and_global_offset(param.shape, sharded.device_mesh, sharded.placements)
        yield local[max(0, len(param) // 2 - start) :]
    elif name.endswith(_B):
        yield local[:, param.shape[1] // 2 :]


def adapter_tensors(causal_lm: nn.Module) -> dict[str, Tensor]:
    """Whole adapter tensors under PEFT's file names; empty without adapters. Collective."""
    params = ((name, cast(DTensor, param.detach())) for name, param in adapter_parameters(causal_lm))
    decoder = _decoder_of(causal_lm)
    return dict(in_file(name, param.full_tensor().cpu(), decoder=decoder) for name, param in params)


@contextmanager
def adapters_off(causal_lm: nn.Module) -> Iterator[None]:
    """Disables the adapters in the block."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in causal_lm.modules() if isinstance(module, LoraLayer)]
    # PEFT's own switch would also freeze the adapters, which FSDP2 records in its first forward.
    experts = [module for module in causal_lm.modules() if isinstance(module, GroupedExperts)]

    def switch(is_on: bool) -> None:
        for layer in layers:
            layer._disable_adapters = not is_on
        for each in experts:
            each.is_adapted = is_on

    switch(False)
    try:
        yield
    finally:
        switch(True)


class DroppedPissa:
    """PEFT's variant of a LoRA layer for PiSSA with dropout: drops inputs of what is learned, none of what the base lacks in PEFT."""

    @staticmethod
    def forward(module: Any, *, active_adapter: str, x: Tensor, result: Tensor, **_: object) -> Tensor:
        """The layer's output [T, out]. result: its base's."""
        a, rank = module.lora_A[active_adapter].weight, module.r[active_adapter] // 2
        inner = linear(module.lora_dropout[active_adapter](x), a[:rank]), linear(x, a[rank:].detach())
        return result + module.scaling[active_adapter] * module.lora_B[active_adapter](torch.cat(inner, dim=-1))


class Dora:
    """PEFT's variant of a LoRA layer for DoRA (arXiv:2402.09353), without its matrices [in, in] and [out, in]."""

    @staticmethod
    def forward(module: Any, *, active_adapter: str, x: Tensor, result: Tensor, **_: object) -> Tensor:
        """The layer's output [T, out]. result: its base's. Norms count as constants, as in the paper's section 4.3."""
        base, a, b = module.get_base_layer(), module.lora_A[active_adapter], module.lora_B[active_adapter]
        scaling, magnitude = module.scaling[active_adapter], module.lora_magnitude_vector[active_adapter].weight
        factor = magnitude.float() / row_norms(base.weight, a.weight, b.weight, scaling=scaling)
        dropped = module.lora_dropout[active_adapter](x)
        own = result if base.bias is None else result - base.bias
        kept = own if dropped is x else linear(dropped, base.weight)
        added = scaling * b(a(dropped))
        return result + added + (factor - 1).to(result.dtype) * (kept + added)
