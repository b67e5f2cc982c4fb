"""What adapters are on either backend: first values, dropout, DoRA's norms, and PEFT's names, files and settings.

An adapter adds the product B A, scaled, to a linear layer's: A is [rank, in], B [out, rank]. Experts have a dimension [E] before.
"""

import json
import math
import re
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasuki.config.schema import FleetConfig
from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.adapter_folder import KEY, in_peft
from tasuki.models.shape import EXPERTS
from tasuki.trainer.durable.model_folder import save_tensors
from tasuki.trainer.modules.experts import GroupedExperts
from tasuki.wire.errors import InvalidArgument

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

EXPERT_A, EXPERT_B = "_lora_A", "_lora_B"
"""Ends of names of experts' adapters: `experts.gate_up_proj_lora_A` [E, rank, in] and `..._lora_B` [E, out, rank]."""
_PIECE_BYTES, _CPU_PIECE_BYTES = 64 << 20, 4 << 20
"""Of experts that are merged at once, in float32: on a GPU few launches within the planner's margin, on a CPU what a cache holds."""
_TOWER_LINEAR = "qkv|proj|gate_proj|up_proj|down_proj|linear_fc1|linear_fc2|mlp\\.[02]"
"""Ends of the names of linear layers in a vision tower, and of a patch's convolution."""


def in_module(name: str) -> str:
    """A parameter's name in PEFT's module, and in checkpoints, by its name in a folder."""
    return re.sub(r"\.lora_\w+\.", r"\g<0>default.", name)


def in_file(name: str, param: Tensor, *, decoder: str = "model") -> tuple[str, Tensor]:
    """Name and values of an adapter's whole parameter in PEFT's file. decoder: of Family.adapter_decoder.

    PEFT wraps the experts of a layer once for each of their matrices, gate_up_proj inside. It stacks rows of A by expert and then by rank,
    columns of B by rank and then by expert.
    """
    if not name.endswith((EXPERT_A, EXPERT_B)):
        name = name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name
        return in_peft(name.replace(".default", ""), decoder=decoder), param
    experts, _, matrix = name.rpartition(".")
    inside = ".base_layer" if matrix.startswith("gate_up_proj") else ""
    stacked = param.flatten(0, 1) if name.endswith(EXPERT_A) else param.permute(1, 2, 0).flatten(1)
    return in_peft(f"{experts}{inside}.lora_{name[-1]}.weight", decoder=decoder), stacked.contiguous()


def from_file(name: str, stored: Tensor, shape: Sequence[int]) -> Tensor:
    """Inverse of `in_file`. shape: of the whole parameter. Raises InvalidArgument for a number that is not finite."""
    if not stored.isfinite().all():
        raise InvalidArgument(KEY, f"{name.replace('.default', '')} holds a number that is not finite; take another adapter")
    if name.endswith(EXPERT_B):
        return stored.view(shape[1], shape[2], shape[0]).permute(2, 0, 1).contiguous()
    return stored.view(*shape)


def peft_config(config: LoraConfig, *, has_tower: bool) -> "PeftConfig":
    """has_tower: whether the model has a vision tower, some of whose layers are named as the text's."""
    # Takes two seconds to import, so only when needed.
    from peft import LoraConfig as PeftConfig

    targets, copies = list(config.targets), 1 + config.is_pissa
    raised = math.sqrt(copies) if config.use_rslora else copies
    experts = list[str](EXPERTS) if config.experts else None
    unnamed = [r"(visual|vision_tower)\.(patch_embed\..*)" if config.tower else r"(visual|vision_tower|audio_tower)\..*"]
    excluded = "|".join([*map(re.escape, config.excluded), *unnamed])
    named = rf"(?!(.*\.)?visual\.).*\.({'|'.join(targets)})|(.*\.)?visual\..*\.({_TOWER_LINEAR})"
    return PeftConfig(
        r=copies * config.rank,
        lora_alpha=cast(int, raised * config.alpha),
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        lora_dropout=config.dropout,
        target_modules=named if config.tower else targets,
        target_parameters=experts,
        exclude_modules=rf"(.*\.)?({excluded})" if has_tower else list(config.excluded) or None,
        rank_pattern={pattern: copies * rank for pattern, rank in config.rank_pattern.items()},
        alpha_pattern={pattern: raised * alpha for pattern, alpha in config.alpha_pattern.items()},
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
    )


def write_adapter(folder: Path, tensors: dict[str, Tensor], *, config: LoraConfig, source: Path) -> None:
    """Writes a folder that PEFT loads. tensors: whole ones, by `in_file`. source: the model folder."""
    folder.mkdir()
    save_tensors(tensors, folder / "adapter_model.safetensors")
    settings = peft_config(config, has_tower=any(".language_model." in name for name in tensors))
    patterns = {"rank_pattern": settings.rank_pattern, "alpha_pattern": settings.alpha_pattern}
    settings.base_model_name_or_path, settings.task_type, settings.inference_mode = str(source), "CAUSAL_LM", True
    if not config.tower:
        settings.target_modules = sorted(config.targets)  # PEFT's is a set, in another order in each process
    settings.save_pretrained(str(folder))
    # PEFT sorts keys, but takes the first pattern that matches a layer.
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | patterns, indent=2))


def adapt_experts(experts: GroupedExperts, config: LoraConfig) -> None:
    """Adds an adapter, uninitialized, to both matrices of each expert."""
    experts.scaling = config.scaling_of(EXPERTS[0])  # patterns are for other layers
    for name, param in list(experts.named_parameters()):
        num_rows, num_columns = param.shape[1:]
        for end, shape in ((EXPERT_A, (config.rank, num_columns)), (EXPERT_B, (num_rows, config.rank))):
            experts.add(name + end, torch.empty(experts.num_experts, *shape, dtype=param.dtype, device=param.device))


def initial_a(shape: Sequence[int], *, init: str, generator: torch.Generator) -> Tensor:
    """First values of A, [..., rank, in] float32 on the CPU, as LoraConfig.init says. B begins as zeros, and changes nothing."""
    rank, columns = shape[-2:]
    if init == "default":
        return torch.empty(*shape).uniform_(-1 / math.sqrt(columns), 1 / math.sqrt(columns), generator=generator)
    std = 1 / rank if init == "gaussian" else math.sqrt(2 / (rank + columns))
    return torch.empty(*shape).normal_(std=std, generator=generator)


def pissa(weight: Tensor, *, init: str, rank: int, scaling: float, seed: int) -> tuple[Tensor, Tensor]:
    """[A; A0], [2 rank, in], and [B, -B0], [out, 2 rank], by PEFT, float32: W + scaling (B A - B0 A0) is PiSSA's, and at first W.

    PEFT subtracts B0 A0 from W instead. Here the base stays, as others read it. weight: whole, [out, in]. seed: of the faster ones.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.float())
    alone = nn.ModuleDict({"layer": linear})
    config = PeftConfig(
        r=rank, lora_alpha=cast(int, scaling * rank), target_modules=["layer"], init_lora_weights=cast(Any, init)
    )
    with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, alone)
    a, b = (cast(Any, alone["layer"]).get_submodule(f"lora_{factor}.default").weight for factor in "AB")
    return torch.cat([a, a]), torch.cat([b, -b], dim=1)


class Dropout(nn.Module):
    """Dropout in an adapter. Its mask depends on the layer and on `set_dropout`'s seed alone, so that recomputation repeats it."""

    def __init__(self, probability: float, index: int) -> None:
        """index: other layers have others."""
        super().__init__()
        self._probability, self._index = probability, index
        self.seed: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.seed is None:
            return x
        generator = torch.Generator(x.device).manual_seed((self.seed + self._index) % 2**63)
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(self._probability, generator=generator)
        return x.masked_fill(mask, 0.0) / (1 - self._probability)


def draw_seed(rank: int, fleet: FleetConfig | None) -> int:
    """Draws a seed for `set_dropout` from torch's random state, which checkpoints hold and all ranks of all nodes share.

    Each rank's differs in its low 32 bits, also with a layer's index added: a CPU's generator takes no others. rank: on its node.
    """
    node_rank = 0 if fleet is None else fleet.node_rank
    return int(torch.randint(2**62, ())) + node_rank * 2**24 + rank * 2**16


def set_dropout(causal_lm: nn.Module, seed: int | None) -> None:
    """Drops numbers of adapters in the next passes, and their recomputation, by this seed; None drops none."""
    for module in causal_lm.modules():
        if isinstance(module, Dropout):
            module.seed = seed


@torch.no_grad()
def merge_experts(held: Sequence[Tensor], base: Tensor, a: Tensor, b: Tensor, *, scaling: float, first_row: int = 0) -> None:
    """Writes W + scaling B A of experts: summed in float32, rounded once. base: [E, out, in].

    held: consecutive rows of base, each of one expert or of whole ones, in one dtype. first_row: of all experts' rows, one after another.
    """
    held = [rows for each in held for rows in (each.unbind() if each.dim() == 3 else [each])]
    piece_bytes = _CPU_PIECE_BYTES if base.device.type == "cpu" else _PIECE_BYTES
    num_rows, at_once = base.shape[1], max(1, piece_bytes // (4 * math.prod(base.shape[1:])))
    starts = accumulate((each.shape[-2] for each in held), initial=first_row)
    for _, piece in groupby(zip(starts, held, strict=False), key=lambda pair: pair[0] // num_rows // at_once):
        firsts, written = zip(*piece, strict=True)
        experts = slice(firsts[0] // num_rows, firsts[-1] // num_rows + 1)
        factors = (each[experts].float() for each in (base, b, a))
        merged = torch.baddbmm(*factors, alpha=scaling).to(written[0].dtype)
        rows, before = merged.flatten(0, 1), firsts[0] % num_rows
        sizes = [each.shape[-2] for each in written]
        torch._foreach_copy_(written, rows[before : before + sum(sizes)].split(sizes))


@torch.no_grad()
def row_norms(
    base: Tensor, a: Tensor, b: Tensor, *, scaling: float | Tensor, columns_over: dist.ProcessGroup | None = None
) -> Tensor:
    """Norms of the rows of W + scaling B A, [out] float32, from products of the size of A and B. W and B may be a rank's rows.

    Rounded to the dtype of W, as are magnitudes: a new adapter changes nothing, and merging computes the same as training.
    scaling: of all of B, or of each of its columns. columns_over: ranks that each have some columns of W and A.
    """
    a, b = a.to(base.dtype), b.to(base.dtype).float() * scaling
    squares = torch.linalg.vector_norm(base, dim=1, dtype=torch.float32).square()
    squares += 2 * ((base @ a.T).float() * b).sum(dim=1)
    squares += (b @ (a.float() @ a.float().T) * b).sum(dim=1)
    if columns_over is not None:
        dist.all_reduce(squares, group=columns_over)
    return squares.sqrt().to(base.dtype).float()
