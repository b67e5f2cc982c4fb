"""What a checkpoint holds of FSDP2's networks, and its export as a Hugging Face folder, on the CPU and without a node."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.known import find_family, read_model_shape
from tasuki.models.shape import ROUTER_BIAS
from tasuki.models.tower import TOWER
from tasuki.trainer.adamw import ShardedAdamW
from tasuki.trainer.backends.fsdp.lora.adapters import FirstValues, adapter_names, trained_parameters
from tasuki.trainer.backends.fsdp.lora.merged_weights import merge
from tasuki.trainer.backends.fsdp.model import Critic, Policy
from tasuki.trainer.durable.atomic_folder import cannot_write, delete_aside, rename_into_place, start_aside
from tasuki.trainer.durable.checkpoint import RoleFacts, computing_settings, read_facts, read_tensors
from tasuki.trainer.durable.checkpoint_files import TensorReader
from tasuki.trainer.durable.model_folder import SafetensorsWriter, copy_other_files, load_shards, read_model_config
from tasuki.trainer.durable.saves import folder_bytes
from tasuki.trainer.modules.lora import in_file, merge_experts, write_adapter
from tasuki.trainer.modules.routing import ExpertLoad
from tasuki.trainer.wire import Role
from tasuki.weights.export import Shard, checkpoint_shards
from tasuki.wire.errors import InvalidArgument, TasukiError


def training_tensors(network: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Trained tensors of a network and their AdamW state, by name."""
    tensors: dict[str, Tensor] = {}
    for name, param in trained_parameters(network):
        tensors[f"model.{name}"] = param.detach()
        # The step count is also a tensor per parameter; all are equal.
        for key, tensor in optimizer.state[param].items():
            tensors[f"optimizer.{key}.{name}"] = tensor
    return tensors


@dataclass(frozen=True, slots=True)
class Trained:
    """A network and its optimizer."""

    network: Policy | Critic
    optimizer: ShardedAdamW
    expert_load: ExpertLoad
    first_values: FirstValues


def training_state(trained: Mapping[Role, Trained]) -> dict[str, Tensor]:
    """Every tensor of the trained networks and their optimizers, by name."""
    for each in trained.values():
        each.optimizer.settle()
    return {
        f"{role}.{name}": tensor
        for role, each in trained.items()
        for name, tensor in (training_tensors(each.network, each.optimizer.optimizer) | _moved_biases(each)).items()
    }


def _moved_biases(trained: Trained) -> dict[str, Tensor]:
    """Routers' biases, if steps change them."""
    if not trained.expert_load.moves_biases:
        return {}
    return {f"model.{name}": buffer for name, buffer in trained.network.named_buffers() if name.endswith(ROUTER_BIAS)}


Told = Callable[[int, int], None]
_POLICY = f"{Role.POLICY}.model.causal_lm."


def export_checkpoint(checkpoint: Path, output: Path, *, source: Path, compute_dtype: str, dtype: str, told: Told) -> int:
    """Writes the policy of a checkpoint, with adapters merged and beside it in adapter/. Returns the bytes written.

    Holds one tensor and one file of the folder in memory. source: the model folder that was trained. compute_dtype: of a model below
    adapters. dtype: of the folder. told: called with the numbers of tensors written and of all. Raises PathExists, PathNotFound,
    DiskFull, and InvalidArgument for a checkpoint that is damaged, or of another model than `source`.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        held, written = getattr(torch, compute_dtype), getattr(torch, dtype)
        return _export(checkpoint, output, source=source, held=held, dtype=written, told=told)
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def _export(checkpoint: Path, output: Path, *, source: Path, held: torch.dtype, dtype: torch.dtype, told: Told) -> int:
    facts, index_crc32 = read_facts(checkpoint)
    policy = facts.roles[Role.POLICY]
    _check_model(checkpoint, policy, source=source)
    reader = TensorReader(checkpoint, index_crc32=index_crc32, progressed=lambda: None)
    alpha = LoraConfig().alpha if policy.lora_alpha is None else policy.lora_alpha
    given = {"rank": policy.lora_rank or 1, "alpha": alpha, "use_rslora": policy.lora_use_rslora, **policy.lora_more}
    lora = LoraConfig.model_validate(given)
    sizes = {name.removeprefix(_POLICY): size for name, size in reader.sizes().items() if name.startswith(_POLICY)}
    model = read_model_shape(source)
    family = find_family(model.architecture)

    def read(name: str) -> Tensor:
        if name not in sizes:
            raise InvalidArgument("path", f"{checkpoint} lacks {name}, which {source} has; give the model it was saved with")
        whole = torch.empty(sizes[name])
        read_tensors(checkpoint, {_POLICY + name: whole}, reader=reader)
        return whole

    aside = start_aside(output, mode=0o777)
    try:
        writer, adapter = SafetensorsWriter(aside, dtype=dtype), dict[str, Tensor]()
        parameters = model.parameters()
        for index, (name, shape) in enumerate(parameters.items()):
            told(index, len(parameters))
            a_name, b_name, magnitude_name = adapter_names(name)
            if policy.lora_rank is None and (name in sizes or not name.startswith(TOWER)):
                tensor = read(name)
            else:
                tensor = torch.empty(shape, dtype=torch.float32 if policy.lora_rank is None else held)
                load_shards(source, checkpoint_shards(name, shape, (0,) * len(shape), tensor, names=family.checkpoint))
            if a_name in sizes:
                a, b = read(a_name), read(b_name)
                magnitude = read(magnitude_name) if magnitude_name in sizes else None
                parts = {a_name: a, b_name: b} | ({} if magnitude is None else {magnitude_name: magnitude})
                adapter |= dict(
                    in_file(*part, decoder=family.adapter_decoder(has_tower=model.tower is not None)) for part in parts.items()
                )
                scaling = lora.scaling_of(name.removesuffix(".weight"))
                base, tensor = tensor, torch.empty(shape, dtype=dtype)
                if len(shape) == 3:
                    merge_experts([tensor], base, a, b, scaling=scaling)
                else:
                    merge(tensor, base=base, factors=(b, a), scaling=scaling, magnitude=magnitude)
            shards = checkpoint_shards(name, shape, (0,) * len(shape), tensor, names=family.checkpoint)
            writer.add({shard.name: shard.local for shard in shards})
        constants = [
            Shard(family.checkpoint.tensor(name), shape, (0,) * len(shape), torch.empty(shape), keeps_dtype=True)
            for name, shape in model.constants().items()
        ]
        load_shards(source, constants)
        for name, constant in zip(model.constants(), constants, strict=True):
            if name in sizes:
                constant.local.copy_(read(name))
        writer.add_untrained(constants, source=source)
        writer.finish()
        copy_other_files(source, aside, dtype=dtype)
        if adapter:
            layers = {name.rpartition(".lora_")[0].removesuffix(".base_layer").rpartition(".")[2] for name in adapter}
            targets = {"target_modules": sorted(layers - {"experts"}), "experts": "experts" in layers}
            named = LoraConfig.model_validate(given | targets)
            write_adapter(aside / "adapter", adapter, config=named, source=source)
    except OSError as error:
        delete_aside(aside, path=output)
        raise cannot_write(output, error) from error
    except TasukiError:
        delete_aside(aside, path=output)
        raise
    rename_into_place(aside, output)
    return folder_bytes(output)


def _check_model(checkpoint: Path, policy: RoleFacts, *, source: Path) -> None:
    """Raises InvalidArgument if `source` is another model than that of the checkpoint."""
    config = read_model_config(source)
    ours = {"architecture": (config.architectures or ["none"])[0], **computing_settings(config)}
    for key, saved in {"architecture": policy.architecture, **policy.model}.items():
        if key in ours and ours[key] != saved:
            problem = f"{checkpoint} was saved with {key} {saved!r}, but config.json of {source} has {ours[key]!r}"
            raise InvalidArgument("path", f"{problem}; give the model that it was saved with")
