"""An adapter in PEFT's format to start from, read from adapter_config.json and headers. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from tasuki.models.config_json import read_json_object
from tasuki.models.shape import EXPERTS, ModelShape
from tasuki.models.stored_tensors import READ_DTYPES, read_file
from tasuki.wire.errors import InvalidArgument, PathNotFound

KEY = "trainer.lora.path"
ADAPTER_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"
_NEUTRAL = {"bias": "none", "megatron_core": "megatron.core", "qalora_group_size": 16}
"""Values without effect that PEFT writes; others are null, false or empty."""
_NO_MATTER = {
    *("r", "lora_alpha", "use_rslora", "init_lora_weights", "target_modules", "peft_type", "peft_version", "lora_dropout"),
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "loftq_config", "eva_config"),
}
"""Keys that are compared, or that change only how an adapter is made."""
_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights whose adapter belongs to the unchanged model."""


def check_adapter(
    folder: Path,
    model: ModelShape,
    *,
    rank: int,
    alpha: float,
    use_rslora: bool,
    target_modules: Sequence[str],
    experts: bool = False,
) -> None:
    """Raises PathNotFound, or InvalidArgument for an adapter that this run cannot continue."""
    for name in (_CONFIG_FILE, ADAPTER_FILE):
        if not (folder / name).is_file():
            raise PathNotFound(f"{KEY}: {folder} is no folder of PEFT's: {name} is missing", path=folder)
    file = folder / _CONFIG_FILE
    config = read_json_object(file, field=KEY)
    if config.get("peft_type") != "LORA":
        raise InvalidArgument(KEY, f"{file} has peft_type {config.get('peft_type')!r}; only LORA can be trained")
    for name, value in config.items():
        if name == "target_parameters" and experts and set(value or ()) == set(EXPERTS):
            continue
        if name not in _NO_MATTER and value and value != _NEUTRAL.get(name):
            problem = f"has {name} {value!r}, which is not supported; merge the adapter into its model with PEFT"
            raise InvalidArgument(KEY, f"{file} {problem}")
    made = config.get("init_lora_weights", True)
    if made not in _KEEP_THE_BASE:
        problem = f"init_lora_weights {made!r} belongs to a changed model; save it with PEFT's path_initial_model_for_weight_conversion"
        raise InvalidArgument(KEY, f"{file}: {problem}")
    for key, ours, name in (("rank", rank, "r"), ("alpha", alpha, "lora_alpha"), ("use_rslora", use_rslora, "use_rslora")):
        if config.get(name, False) != ours:
            raise InvalidArgument(
                f"trainer.lora.{key}", f"is {ours}, but {file} has {name} {config.get(name, False)}; set the same"
            )
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in model.parameters().items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in target_modules and len(shape) == 2:
            a, b = (f"base_model.model.{layer}.lora_{part}.weight" for part in "AB")
            wanted |= {a: (rank, shape[1]), b: (shape[0], rank)}
        if experts and name.endswith(EXPERTS):
            # See trainer/backends/fsdp/lora/adapters.py.
            wrapped = f"base_model.model.{name.rpartition('.')[0]}{'.base_layer' if name.endswith(EXPERTS[0]) else ''}"
            stacked = shape[0] * rank
            wanted |= {f"{wrapped}.lora_A.weight": (stacked, shape[-1]), f"{wrapped}.lora_B.weight": (shape[1], stacked)}
    stored = read_file(folder / ADAPTER_FILE, key=KEY)
    for name in sorted(wanted.keys() ^ stored.keys()):
        if name in stored:
            problem = (
                f"holds {name}, which the {model.architecture} of trainer.lora.target_modules = {list(target_modules)} lacks"
            )
        else:
            problem = f"lacks {name}, which trainer.lora.target_modules = {list(target_modules)} needs"
        raise InvalidArgument(KEY, f"{folder / ADAPTER_FILE} {problem}")
    for name, shape in wanted.items():
        tensor = stored[name]
        if tensor.shape != shape or tensor.dtype not in READ_DTYPES:
            problem = f"{name} is {tensor.dtype} {list(tensor.shape)}, not {' or '.join(READ_DTYPES)} {list(shape)}"
            raise InvalidArgument(KEY, f"{folder / ADAPTER_FILE}: {problem}")
