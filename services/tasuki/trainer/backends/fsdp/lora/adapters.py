"""LoRA with PEFT: adapters on linear layers of a frozen model. An adapter adds the product B A, scaled.

PEFT renames parameters: `q_proj.weight` becomes `q_proj.base_layer.weight`, next to `q_proj.lora_A.default.weight` [rank, in] and
`q_proj.lora_B.default.weight` [out, rank]. Only this module knows these names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.adapter_folder import ADAPTER_FILE
from tasuki.trainer.durable.model_folder import save_tensors

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

_BASE, _A, _B = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"


def adapter_names(weight: str) -> tuple[str, str]:
    """Names of A and B of an adapted weight."""
    layer = weight.removesuffix(".weight")
    return layer + _A, layer + _B


def file_name(name: str) -> str:
    """An adapter's parameter in PEFT's file."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def _peft_config(config: LoraConfig) -> PeftConfig:
    # Takes two seconds to import, so only when needed.
    from peft import LoraConfig as PeftConfig

    alpha, targets = cast(int, config.alpha), [*map(str, config.target_modules)]
    return PeftConfig(r=config.rank, lora_alpha=alpha, use_rslora=config.use_rslora, target_modules=targets)


def add_adapters(causal_lm: nn.Module, config: LoraConfig) -> None:
    """Freezes the model and adds adapters, in float32 and uninitialized, to the layers that `config` names.

    The model must have these layers (config.checks.check_lora_targets).
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(_peft_config(config), causal_lm)
    for _, param in trained_parameters(causal_lm):
        param.data = param.data.float()


@torch.no_grad()
def initialize_adapters(causal_lm: nn.Module, *, seed: int) -> None:
    """Initializes A uniformly as in PEFT and B to zero, so that the policy equals the base model. Independent of the number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in causal_lm.named_parameters():
        if name.endswith(_A):
            bound = 1 / math.sqrt(param.shape[1])
            whole = torch.empty(param.shape).uniform_(-bound, bound, generator=generator).to(param.device)
            sharded = cast(DTensor, param)
            # Every rank generates the whole tensor: nothing is sent.
            param.copy_(distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None))
        elif name.endswith(_B):
            param.zero_()


@torch.no_grad()
def load_adapters(causal_lm: nn.Module, folder: Path) -> None:
    """Reads the adapters from PEFT's folder, which config.checks has judged. Every rank reads the whole file: nothing is sent."""
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        for name, param in adapter_parameters(causal_lm):
            sharded = cast(DTensor, param)
            whole = file.get_tensor(file_name(name)).to(param.device, param.dtype)
            param.copy_(distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None))


def base_parameters(causal_lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own parameters under their original names, with or without adapters."""
    for name, param in causal_lm.named_parameters():
        if not name.endswith((_A, _B)):
            yield name.replace(f"{_BASE}.", "."), param


def adapter_parameters(causal_lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A and B of every adapter, named `<layer>.lora_A.weight` and `<layer>.lora_B.weight`."""
    for name, param in causal_lm.named_parameters():
        if name.endswith((_A, _B)):
            yield name.replace(".default.", "."), param


def adapted_parameters(causal_lm: nn.Module) -> dict[str, tuple[DTensor, DTensor, DTensor, float]]:
    """W, A, B and scaling of every adapted weight, by its name; empty without adapters."""
    params = cast(dict[str, DTensor], {name: param.detach() for name, param in causal_lm.named_parameters()})
    layers = [name.removesuffix(_A) for name in params if name.endswith(_A)]
    return {
        f"{layer}.weight": (
            params[f"{layer}{_BASE}.weight"],
            params[f"{layer}{_A}"],
            params[f"{layer}{_B}"],
            cast(Any, causal_lm.get_submodule(layer)).scaling["default"],
        )
        for layer in layers
    }


def trained_parameters(causal_lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trained parameters: only the adapters if there are any, otherwise all."""
    return ((name, param) for name, param in causal_lm.named_parameters() if param.requires_grad)


def adapter_tensors(causal_lm: nn.Module) -> dict[str, Tensor]:
    """Whole adapter tensors under PEFT's file names; empty without adapters. Collective."""
    params = ((name, cast(DTensor, param.detach())) for name, param in adapter_parameters(causal_lm))
    return {file_name(name): param.full_tensor().cpu() for name, param in params}


def write_adapter(folder: Path, tensors: dict[str, Tensor], *, config: LoraConfig, source: Path) -> None:
    """Writes a folder that PEFT loads. tensors: of `adapter_tensors`. source: the model folder."""
    folder.mkdir()
    save_tensors(tensors, folder / "adapter_model.safetensors")
    settings = _peft_config(config)
    settings.base_model_name_or_path, settings.task_type, settings.inference_mode = str(source), "CAUSAL_LM", True
    settings.target_modules = sorted(config.target_modules)  # PEFT's is a set, in another order in each process
    settings.save_pretrained(str(folder))


@contextmanager
def adapters_off(causal_lm: nn.Module) -> Iterator[None]:
    """Disables the adapters in the block."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in causal_lm.modules() if isinstance(module, LoraLayer)]
    # PEFT's own switch would also freeze the adapters, which FSDP2 records in its first forward.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
