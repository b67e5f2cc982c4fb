"""The megatron-core backend of the learner: tensor and data parallelism of one rank's networks, their memory, optimizer and files."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.batch import Metric
from tasuki.config.checks import check_model
from tasuki.config.choices import Choices
from tasuki.config.paths import model_source, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import LoraConfig, MegatronConfig
from tasuki.memory.arena import set_host_budget
from tasuki.models.folder_files import text_digests
from tasuki.models.known import find_family, read_model
from tasuki.models.stored_tensors import check_head, check_stored, read_stored
from tasuki.planner.choose import chosen
from tasuki.planner.node import Checkpointing, node_of
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.trainer.adamw import MOMENTS
from tasuki.trainer.attention.packed import PackedAttention
from tasuki.trainer.attention.trial import choose_kernel, choose_sharing
from tasuki.trainer.backend import Progress
from tasuki.trainer.backends.megatron.groups import Groups
from tasuki.trainer.backends.megatron.lora import (
    adapters_off,
    add_adapters,
    fill_adapters,
    initialize_magnitudes,
    merges,
)
from tasuki.trainer.backends.megatron.model import Policy, set_checkpointing
from tasuki.trainer.backends.megatron.optimizer import PartsAdamW, StreamedPartsAdamW
from tasuki.trainer.backends.megatron.weights import Part, gather_weights, make_parts
from tasuki.trainer.data.micro_batch import WHOLE, SequencePart, TokenBatch
from tasuki.trainer.durable.atomic_folder import on_first_rank
from tasuki.trainer.durable.checkpoint import (
    CheckpointFacts,
    Slices,
    check_checkpoint,
    checkpoint_facts,
    load_checkpoint,
    save_checkpoint,
)
from tasuki.trainer.durable.model_folder import load_shards, read_model_config, write_model
from tasuki.trainer.memory import Publication, TrainerMemory
from tasuki.trainer.modules.lora import draw_seed, in_file, in_module, set_dropout, write_adapter
from tasuki.trainer.modules.routing import ExpertLoad
from tasuki.trainer.replicas import NodeReplicas, mesh_device
from tasuki.trainer.resident_tags import ExportChoice, ResidentTags, choose_handles
from tasuki.trainer.wire import Role
from tasuki.weights.export import ExportMemory, Shard, WeightExport, checkpoint_shards, fill_shards
from tasuki.wire.stages import MemoryTag

_log = logging.getLogger("tasuki.trainer")


@dataclass(frozen=True, slots=True)
class _Network:
    policy: Policy
    parts: list[Part]
    """Of the model, which are frozen below adapters."""
    adapters: list[Part]


class MegatronBackend:
    """Implements tasuki.trainer.backend.Backend, which documents the methods, for the policy and its reference."""

    def __init__(
        self,
        node: NodeConfig,
        choices: Choices,
        *,
        mesh: DeviceMesh,
        replicas: NodeReplicas | None = None,
        heartbeat: Heartbeat | None = None,
        ended: Callable[[str], None] = lambda part: None,
    ) -> None:
        """Loads the initial weights. See FsdpBackend.

        Raises the errors of read_model_config, check_model, node_of, check_stored and load_shards.
        """
        config, rank = node.trainer, mesh.get_local_rank()
        self.device, self.num_ranks = mesh_device(mesh), mesh.size()
        if node.memory.host_budget_bytes is not None:
            set_host_budget(node.memory.host_budget_bytes // mesh.size())
        self._node, self._mesh, self._replicas = node, mesh, replicas
        self._model_path = model_source(node)
        self._model_config = read_model_config(self._model_path)
        self._model = read_model(self._model_config.to_dict())
        check_model(node, self._model.shape)
        check_stored(self._model_path, self._model.shape)
        self._digests = text_digests(node.model.path)
        torch.manual_seed(node.seed)
        self._choices = choices
        layout, timeout_s = config.megatron or MegatronConfig(), node.coordinator.stage_timeout_s
        self._groups = Groups.join(layout, device=self.device, timeout_s=timeout_s, seed=node.seed)
        self.memory = TrainerMemory(
            mesh,
            ExportChoice.of(node, choices, rank=rank, handles=choose_handles(mesh)),
            resident=ResidentTags.of(choices, rank=rank),
            heartbeat=heartbeat,
        )
        self.memory.pin_in_background(chosen(node_of(node, gpu_bytes=1, host_bytes=1), choices))
        self.publication = Publication(self.memory, self._make_export)
        ended("planning")
        self._compute_dtype: torch.dtype = getattr(torch, config.compute_dtype)
        self._policy = self._load(dtype=getattr(torch, config.param_dtype), lora=config.lora)
        self._reference: _Network | None = None
        set_checkpointing(self._policy.policy, Checkpointing(choices.checkpointing), kept_layers=choices.kept_layers)
        ended("model")
        self._trained = self._policy.adapters or self._policy.parts
        if self._policy.adapters:
            self.memory.freeze(part.buffer for part in self._policy.parts)
        self._merges = merges(self._policy.policy)
        self._expert_load = ExpertLoad(
            self._policy.policy, mesh=mesh, device=self.device, aux_loss_coef=config.router_aux_loss_coef
        )
        kind = StreamedPartsAdamW if config.optimizer_on_host else PartsAdamW
        self._optimizer = kind(self._trained, groups=self._groups, config=config, memory=self.memory, mesh=mesh)
        ended("memory")

    @property
    def sequence_part(self) -> SequencePart:
        return WHOLE

    @property
    def shares_prompts(self) -> bool:
        return self._policy.policy.attention.shares_prompts

    def num_parameters(self, role: Role) -> int:
        return self._model.shape.num_parameters

    def score_tokens(self, role: Role, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        self.memory.wait_for_content()
        lora, network = self._node.trainer.lora, self._network(role).policy
        if lora is not None and lora.dropout:
            # As on FSDP2. Ranks have other tokens, or other parts of the layers.
            is_training = role is Role.POLICY and torch.is_grad_enabled()
            set_dropout(network, draw_seed(self._mesh.get_local_rank(), self._node.fleet) if is_training else None)
        off = role is Role.REFERENCE and lora is not None
        with self._groups.computing(), adapters_off(network) if off else nullcontext():
            return network(batch)

    def score_values(self, batch: TokenBatch) -> Tensor:
        raise AssertionError("check_config refuses a critic")

    def backward(self, role: Role, loss: Tensor, *, share: float) -> None:
        # Ranks that split a micro-batch's layers all have its share.
        auxiliary = self._expert_load.end_pass(share=share / self._groups.tensor.size())
        with self._groups.computing():
            (loss if auxiliary is None else loss + auxiliary).backward()

    def routing_metrics(self, role: Role) -> Mapping[str, Metric]:
        return self._expert_load.take()

    def release_gathered(self, role: Role) -> None:
        """Nothing is gathered between passes."""
        if role is Role.POLICY:
            self._expert_load.discard_call()

    def check_alike(self, numbers: Mapping[str, float]) -> None:
        if self._replicas is not None:
            self._replicas.check_alike(numbers)

    def clip_gradients(self, role: Role) -> float:
        return self._optimizer.clip(self._replicas)

    def step_optimizer(self, role: Role, *, learning_rate: float) -> None:
        self._optimizer.step(learning_rate=learning_rate)

    def clear_gradients(self, role: Role) -> None:
        self._optimizer.clear_gradients()

    def reset_optimizer(self, role: Role) -> None:
        self._optimizer.reset()

    def warm_up(self) -> None:
        """Rehearses the first publication on a GPU."""
        if self.device.type == "cuda":
            self.publication.try_rehearsal()

    def save_checkpoint(self, path: Path, *, progress: Mapping[Role, Progress], save_id: str | None = None) -> int:
        self.memory.wait_for_content()
        return save_checkpoint(path, tensors=self._saved(), facts=self._facts(progress), save_id=save_id)

    def check_checkpoint(self, path: Path) -> Mapping[Role, Progress]:
        return check_checkpoint(path, tensors=self._saved(), have=self._facts()).progress

    def load_checkpoint(self, path: Path, *, progressed: Callable[[], None]) -> Mapping[Role, Progress]:
        self.memory.wait_for_content()
        facts = load_checkpoint(path, tensors=self._saved(), have=self._facts(), progressed=progressed)
        gather_weights(self._trained)
        return facts.progress

    def export_model(self, path: Path) -> int:
        self.memory.wait_for_content()
        dtype, source, lora = getattr(torch, self._node.export_dtype), self._node.model.path, self._node.trainer.lora

        def last(folder: Path) -> None:
            if (config := lora) is not None:
                whole = self._whole(self._trained, torch.float32)
                tensors = dict(in_file(name, tensor.cpu()) for each in whole for name, tensor in each.items())
                on_first_rank(lambda: write_adapter(folder / "adapter", tensors, config=config, source=source), path=path)

        return write_model(path, self._whole_tensors(dtype), source=source, digests=self._digests, dtype=dtype, last=last)

    def close(self) -> None:
        """Closes the export, so that no one else receives the weights, frees host memory, and leaves the groups."""
        self.memory.close()
        self.publication.close()
        self._optimizer.close()
        self._groups.leave()

    def _network(self, role: Role) -> _Network:
        """The reference is loaded at its first use, or is the policy without its adapters."""
        if role is Role.POLICY or self._node.trainer.lora is not None:
            return self._policy
        if self._reference is None:
            self._reference = self._load(dtype=self._compute_dtype)
            self._reference.policy.requires_grad_(False)
        return self._reference

    def _load(self, *, dtype: torch.dtype, lora: LoraConfig | None = None) -> _Network:
        """dtype: of the weights that are stepped: adapters', if there are any. Every rank reads its rows alone."""
        model, shape = self._model, self._model.shape
        size = self._groups.tensor.size()
        part = replace(shape, num_heads=shape.num_heads // size, num_kv_heads=shape.num_kv_heads // size)
        settings = {"shape": part, "attention": model.attention, "dtype": self._compute_dtype, "device": self.device}
        kernel = choose_kernel(self._node.trainer.attention_backend, **settings)
        shares_prompts = choose_sharing(kernel, self._node.trainer.prefix_sharing, **settings)
        attention = PackedAttention(kernel, model.attention, shares_prompts=shares_prompts)
        policy = Policy(self._model_config, model, self._groups, dtype=self._compute_dtype, attention=attention)
        if lora is not None:
            add_adapters(policy, shape, lora, self._groups)
        region = self.memory.region(MemoryTag.WEIGHTS)
        made = make_parts(policy, shape, self._groups, dtype=dtype, region=region)
        adapters = [part for part in made if lora is not None and part.parameter.requires_grad]
        parts = [part for part in made if part not in adapters]
        load_shards(self._model_path, self._stored(shard for each in parts for shard in each.shards(each.weights)))
        if lora is not None:
            fill_adapters(adapters, lora, shape, seed=self._node.seed)
        gather_weights(made)
        if lora is not None and lora.path is None:
            initialize_magnitudes(policy, adapters)
        if shape.is_tied:
            check_head(read_stored(self._model_path), shape, first=self._mesh.get_local_rank(), step=self._mesh.size())
        return _Network(policy, parts, adapters)

    def _stored(self, shards: Iterable[Shard]) -> list[Shard]:
        """The same slices, of tensors as a checkpoint has them."""
        names = find_family(self._model.shape.architecture).checkpoint
        return [
            stored
            for shard in shards
            for stored in checkpoint_shards(shard.name, shard.global_shape, shard.offsets, shard.local, names=names)
        ]

    def _slices(
        self, parts: Iterable[Part], dtype: torch.dtype, *, split: Callable[[Iterable[Shard]], list[Shard]] = list
    ) -> list[Shard]:
        """This rank's slices, of which all ranks' cover every tensor once; in `dtype` if it holds them in it. With adapters merged.

        split: a part's slices into those of tensors as they are to be named.
        """
        shards: list[Shard] = []
        for part in parts:
            if part.is_shared and self._groups.tensor.rank():
                continue
            made = split(
                part.shards(part.own(part.buffer)[: len(part.weights)] if part.buffer.dtype is dtype else part.weights)
            )
            if (merge := self._merges.get(part.parameter)) is not None:
                write = partial(merge, first_row=part.first)
                made = [replace(shard, write=write) for shard in made]
            shards += made
        return shards

    def _make_export(self, memory: ExportMemory) -> WeightExport:
        rank, dtype = self._mesh.get_local_rank(), getattr(torch, self._node.rollout.dtype)
        return WeightExport(
            self._slices(self._policy.parts, dtype, split=self._stored)
            if self._node.served_adapter is None
            else self._slices(self._trained, dtype),
            rank=rank,
            num_ranks=self._mesh.size(),
            dtype=dtype,
            socket_path=socket_dir(self._node.state_dir) / f"weights-{rank}.sock",
            memory=memory,
        )

    def _whole_tensors(self, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """Every checkpoint tensor, those of a parameter at a time, whole on rank 0. Collective."""
        for tensors in self._whole(self._policy.parts, dtype):
            wholes = [Shard(name, tuple(whole.shape), (0,) * whole.dim(), whole) for name, whole in tensors.items()]
            yield {shard.name: shard.local for shard in self._stored(wholes)}

    def _whole(self, parts: Iterable[Part], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        for part in parts:
            shapes = {band.name: band.shape for band in part.bands}
            wholes = {name: torch.zeros(shape, dtype=dtype, device=self.device) for name, shape in shapes.items()}
            shards = self._slices([part], dtype)
            fill_shards((each, wholes[each.name][tuple(map(slice, each.offsets, each.box.ends))]) for each in shards)
            for whole in wholes.values():
                # As bytes: every other rank has zeros there, and a sum of numbers would lose the sign of a zero.
                dist.reduce(whole.view(torch.uint8), dst=0, group=self._mesh.get_group("dp"))
            yield wholes

    def _saved(self) -> dict[str, Tensor]:
        """Trained tensors and their AdamW state, by their names in checkpoints, which are those of every backend."""
        slices: dict[str, tuple[tuple[int, ...], list[Shard]]] = {}
        steps: dict[str, Tensor] = {}
        for part, stepped in self._optimizer.stepped.items():
            state = self._optimizer.optimizer.state[stepped]
            held = {"model": part.weights} | {f"optimizer.{moment}": state[moment] for moment in MOMENTS}
            for kind, rows in held.items():
                for band in part.bands:
                    slices.setdefault(f"{kind}.causal_lm.{in_module(band.name)}", (band.shape, []))
                for shard in part.shards(rows):
                    slices[f"{kind}.causal_lm.{in_module(shard.name)}"][1].append(shard)
            steps |= {f"optimizer.step.causal_lm.{in_module(band.name)}": state["step"] for band in part.bands}
        tensors = {name: Slices.of(shape, each) for name, (shape, each) in slices.items()} | steps
        return {f"{Role.POLICY}.{name}": tensor for name, tensor in tensors.items()}

    def _facts(self, progress: Mapping[Role, Progress] | None = None) -> CheckpointFacts:
        models = {Role.POLICY: self._model_config}
        return checkpoint_facts(models, progress=progress, config=self._node.trainer, num_ranks=self._mesh.size())
