"""An adapter in PEFT's format to start from, read from adapter_config.json and headers. Needs no torch."""

import re
from collections.abc import Iterable
from itertools import permutations, product
from pathlib import Path
from typing import TYPE_CHECKING

from tasuki.models.config_json import read_json_object
from tasuki.models.known import find_family
from tasuki.models.shape import EXPERTS, ModelShape
from tasuki.models.stored_tensors import READ_DTYPES, read_file
from tasuki.models.stored_values import differs
from tasuki.models.tower import TOWER
from tasuki.wire.errors import InvalidArgument, PathNotFound

if TYPE_CHECKING:
    from tasuki.config.trainer_schema import LoraConfig

KEY = "trainer.lora.path"
ADAPTER_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"
_NEUTRAL = {"bias": "none", "megatron_core": "megatron.core", "qalora_group_size": 16}
"""Values without effect that PEFT writes; others are null, false or empty."""
_COMPARED = {
    "rank": "r",
    "alpha": "lora_alpha",
    **{key: key for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")},
}
"""PEFT's names of keys in [trainer.lora] that must agree."""
_NO_MATTER = {
    *("init_lora_weights", "target_modules", "exclude_modules", "peft_type", "peft_version", "lora_dropout"),
    *_COMPARED.values(),
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "loftq_config", "eva_config"),
}
"""Keys that are compared, or that change only how an adapter is made."""
_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights whose adapter belongs to the unchanged model."""
_NUM_COMPARED = 7
"""Layers whose A is compared at a start: those of the first decoder layer. The trainer compares all while it loads."""
FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""megatron-core's linear layers, and those of a checkpoint that each computes."""


def unfused(name: str) -> list[str]:
    """Names in a checkpoint for the name of a linear layer, or the end of one, which may be megatron-core's."""
    before, dot, last = name.rpartition(".")
    before = before.replace("self_attention", "self_attn").replace("decoder", "model")
    return [f"{before}{dot}{part}" for part in FUSED[last]] if last in FUSED else [name]


def is_end(name: str, layer: str) -> bool:
    """Whether PEFT takes `name` for this layer: all of its name, or the last parts."""
    return f".{layer}".endswith(f".{name}")


def is_match(pattern: str, layer: str) -> bool:
    """Whether PEFT takes `pattern` for this layer; the first that matches counts."""
    return re.match(rf"(.*\.)?({pattern})$", layer) is not None


def in_peft(name: str, *, decoder: str) -> str:
    """PEFT's name of a layer or parameter. decoder: the family's."""
    named = f"model.{name}" if name.startswith(TOWER) else name.replace("model.", f"{decoder}.", 1)
    return f"base_model.model.{named}"


def stored_decoder(names: Iterable[str], *, decoder: str) -> str:
    """Name of the decoder in an adapter's file: `decoder`, of the vision model, or that of its text alone, if PEFT has adapted this."""
    return decoder if any(f".{decoder}." in name for name in names) else "model"


def check_adapter(folder: Path, model: ModelShape, lora: "LoraConfig") -> None:
    """Raises PathNotFound, or InvalidArgument for an adapter that this run cannot continue."""
    for name in (_CONFIG_FILE, ADAPTER_FILE):
        if not (folder / name).is_file():
            raise PathNotFound(f"{KEY}: {folder} is no folder of PEFT's: {name} is missing", path=folder, field=KEY)
    file = folder / _CONFIG_FILE
    config = read_json_object(file, field=KEY)
    if config.get("peft_type") != "LORA":
        raise InvalidArgument(KEY, f"{file} has peft_type {config.get('peft_type')!r}; only LORA can be trained")
    for name, value in config.items():
        if name == "target_parameters" and lora.experts and value in map(list, permutations(EXPERTS)):
            continue
        if name not in _NO_MATTER and value and value != _NEUTRAL.get(name):
            problem = f"has {name} {value!r}, which is not supported; merge the adapter into its model with PEFT"
            raise InvalidArgument(KEY, f"{file} {problem}")
    made = config.get("init_lora_weights", True)
    if made not in _KEEP_THE_BASE:
        problem = f"init_lora_weights {made!r} belongs to a changed model; save it with PEFT's path_initial_model_for_weight_conversion, "
        problem += "or set it to true there and train on that model (docs/guides/lora.md#pissa)"
        raise InvalidArgument(KEY, f"{file}: {problem}")
    for key, name in _COMPARED.items():
        ours, theirs = getattr(lora, key), config.get(name) or type(getattr(lora, key))()
        # Of patterns the first that matches counts.
        if theirs != ours or (isinstance(ours, dict) and list(theirs) != list(ours)):
            raise InvalidArgument(f"trainer.lora.{key}", f"is {ours!r}, but {file} has {name} {theirs!r}; set the same")
    stored = read_file(folder / ADAPTER_FILE, key=KEY)
    decoder = find_family(model.architecture).adapter_decoder(has_tower=model.tower is not None)
    decoder = stored_decoder(stored, decoder=decoder)
    wanted: dict[str, tuple[int, ...]] = {}
    for layer, (num_rows, num_columns) in lora.layers(model).items():
        inside = in_peft(layer, decoder=decoder)
        a, b = (f"{inside}.lora_{part}.weight" for part in "AB")
        wanted |= {a: (lora.rank_of(layer), num_columns), b: (num_rows, lora.rank_of(layer))}
        if lora.use_dora:
            wanted[f"{inside}.lora_magnitude_vector"] = (num_rows,)
    for name, shape in model.parameters().items():
        if lora.experts and name.endswith(EXPERTS):
            # See trainer/modules/lora.py.
            wrapped = in_peft(name.rpartition(".")[0], decoder=decoder) + (".base_layer" if name.endswith(EXPERTS[0]) else "")
            stacked = shape[0] * lora.rank
            wanted |= {f"{wrapped}.lora_A.weight": (stacked, shape[-1]), f"{wrapped}.lora_B.weight": (shape[1], stacked)}
    excluded = f" and exclude_modules = {list(lora.exclude_modules)}" if lora.exclude_modules else ""
    layers = f"trainer.lora.target_modules = {list(lora.target_modules)}{excluded}"
    for name in sorted(wanted.keys() ^ stored.keys()):
        if name in stored:
            problem = f"holds {name}, which the {model.architecture} of {layers} lacks"
        else:
            problem = f"lacks {name}, which {layers} needs"
        raise InvalidArgument(KEY, f"{folder / ADAPTER_FILE} {problem}")
    for name, shape in wanted.items():
        tensor = stored[name]
        if tensor.shape != shape or tensor.dtype not in READ_DTYPES:
            problem = f"{name} is {tensor.dtype} {list(tensor.shape)}, not {' or '.join(READ_DTYPES)} {list(shape)}"
            raise InvalidArgument(KEY, f"{folder / ADAPTER_FILE}: {problem}")
    if lora.is_fused:
        check_shared_a(folder / ADAPTER_FILE, list(lora.layers(model))[:_NUM_COMPARED], lora)


def check_shared_a(file: Path, layers: Iterable[str], lora: "LoraConfig") -> None:
    """Raises InvalidArgument for one of these layers that has another A than those that megatron-core computes with it."""
    stored = read_file(file, key=KEY)
    for layer, (first, *others) in product(layers, FUSED.values()):
        for other in others if is_end(first, layer) else ():
            names = [f"{layer.removesuffix(first)}{part}.lora_A.weight" for part in (first, other)]
            one, another = (stored[in_peft(name, decoder="model")] for name in names)
            if one.dtype != another.dtype or differs(one, another, first=0, step=1):
                problem = f'has different {" and ".join(names)}, which are one with type = "{lora.type}"; set "canonical_lora"'
                raise InvalidArgument(KEY, f"{file} {problem}")
