"""The FSDP2 backend of the learner: one rank's networks, memory, optimizers and files."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from tasuki.algorithms.batch import Metric
from tasuki.config.choices import Choices
from tasuki.config.paths import model_source, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import LoraConfig, OptimizerConfig
from tasuki.memory.arena import set_host_budget
from tasuki.models.folder_files import text_digests
from tasuki.models.known import read_model_shape
from tasuki.models.stored_tensors import check_stored
from tasuki.planner.choose import chosen
from tasuki.planner.node import Checkpointing, node_of
from tasuki.planner.step_bytes import TRIAL_TOKENS, offloaded_per_token
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.trainer.adamw import ShardedAdamW, StreamedAdamW, local_part
from tasuki.trainer.attention.sequence_parallel import SequenceGroup
from tasuki.trainer.backend import Progress
from tasuki.trainer.backends.fsdp.activations import set_checkpointing, tile_mlps
from tasuki.trainer.backends.fsdp.checkpoint import Trained, training_state
from tasuki.trainer.backends.fsdp.lora.adapters import FirstValues, adapters_off, trained_parameters
from tasuki.trainer.backends.fsdp.lora.merged_weights import MergedWeights
from tasuki.trainer.backends.fsdp.memory import FsdpMemory, HostActivations, HostShards
from tasuki.trainer.backends.fsdp.model import (
    Critic,
    NetworkSource,
    Policy,
    groups_of,
    load_critic,
    load_policy,
    reshard,
)
from tasuki.trainer.backends.fsdp.optimizer import QuantizedAdamW
from tasuki.trainer.backends.fsdp.shards import adapter_shards, constant_shards, export_model, map_base, merged_shards
from tasuki.trainer.data.micro_batch import WHOLE, SequencePart, TokenBatch
from tasuki.trainer.durable.checkpoint import (
    CheckpointFacts,
    check_checkpoint,
    checkpoint_facts,
    load_checkpoint,
    save_checkpoint,
)
from tasuki.trainer.durable.model_folder import read_model_config
from tasuki.trainer.memory import Publication
from tasuki.trainer.modules.compiled_blocks import compile_mlps, compiling_ahead, trial_batch
from tasuki.trainer.modules.lora import draw_seed, set_dropout
from tasuki.trainer.modules.routing import ExpertLoad
from tasuki.trainer.replicas import NodeReplicas, mesh_device
from tasuki.trainer.resident_tags import ExportChoice, ResidentTags, choose_handles
from tasuki.trainer.wire import Role
from tasuki.weights.export import ExportMemory, WeightExport
from tasuki.weights.shared_base import SharedBase
from tasuki.wire.stages import MemoryTag

_HOST_ADVICE = "free memory of the host, or set trainer.reference_on_host = false for a reference on the GPU"
_log = logging.getLogger("tasuki.trainer")


class FsdpBackend:
    """Implements tasuki.trainer.backend.Backend, which documents the methods."""

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
        """Loads the initial weights. mesh: of this node. replicas: this rank's counterparts on other nodes. ended: told of each part.

        heartbeat: shows the progress of background work.

        Raises the errors of read_model_config, node_of, check_stored and load_shards.
        """
        config = node.trainer
        self.device, self.num_ranks = mesh_device(mesh), mesh.size()
        if node.memory.host_budget_bytes is not None:
            set_host_budget(node.memory.host_budget_bytes // mesh.size())
        handles = choose_handles(mesh)
        self._node, self._choices, self._mesh, self._replicas = node, choices, mesh, replicas
        self._model_path = model_source(node)
        self._model_config = read_model_config(self._model_path)
        check_stored(self._model_path, read_model_shape(self._model_path))
        self._digests = text_digests(node.model.path)
        torch.manual_seed(node.seed)
        self._planned, self._to_close = chosen(node_of(node, gpu_bytes=1, host_bytes=1), choices), ExitStack()
        self._sharing = SequenceGroup.of(mesh, size=config.sequence_parallel, timeout_s=node.coordinator.stage_timeout_s)
        _log.info("event=checkpointing choice=%s kept_layers=%d", choices.checkpointing, choices.kept_layers)
        self.memory = FsdpMemory(
            mesh,
            ExportChoice.of(node, choices, rank=mesh.get_local_rank(), handles=handles),
            resident=ResidentTags.of(choices, rank=mesh.get_local_rank()),
            heartbeat=heartbeat,
        )
        self.memory.pin_in_background(self._planned)
        self.publication = Publication(self.memory, self._make_export, replaced=lambda: self._merged)
        self._merged: MergedWeights | None = None
        self._reference: Policy | None = None
        self._base: SharedBase | None = None
        if choices.shares_base:
            self._base = map_base(node, rank=mesh.get_local_rank(), device=self.device)
            self._to_close.callback(self._base.close)
        ended("planning")
        source = self._source(self._model_path, lora=config.lora)
        self._policy = load_policy(replace(source, base=self._base), region=self._weights())
        ended("model")
        self._trained = {Role.POLICY: self._train(self._policy, config)}
        ended("memory")
        optimizer = config.critic_optimizer
        if config.critic is not None and optimizer is not None:
            source = self._source(config.critic.path or self._model_path, lora=config.critic_lora)
            critic = load_critic(source, region=self._weights())
            ended("model")
            self._trained[Role.CRITIC] = self._train(critic, optimizer)
            ended("memory")

    @property
    def _compiles(self) -> bool:
        return self._node.trainer.compile == "blocks"

    @property
    def sequence_part(self) -> SequencePart:
        return WHOLE if self._sharing is None else self._sharing.part

    @property
    def shares_prompts(self) -> bool:
        return all(trained.network.shares_prompts for trained in self._trained.values())

    def num_parameters(self, role: Role) -> int:
        return sum(param.numel() for param in self._network(role).parameters())

    def score_tokens(self, role: Role, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        self.memory.restore_base()
        if role is Role.REFERENCE and self._node.trainer.lora is not None:
            with adapters_off(self._policy.causal_lm):
                return self._policy(batch)
        if role is Role.POLICY and self._node.trainer.lora is not None and self._node.trainer.lora.dropout:
            drawn = draw_seed(self._mesh.get_local_rank(), self._node.fleet) if torch.is_grad_enabled() else None
            set_dropout(self._policy.causal_lm, drawn)
        return self._network(role)(batch)

    def score_values(self, batch: TokenBatch) -> Tensor:
        return self._network(Role.CRITIC)(batch)

    def backward(self, role: Role, loss: Tensor, *, share: float) -> None:
        # Ranks that compute parts of a micro-batch all have its share.
        auxiliary = self._trained[role].expert_load.end_pass(share=share / self.sequence_part.num_parts)
        # FSDP2 reduces each group's gradients once they are complete, and adds the shards to those of earlier micro-batches.
        (loss if auxiliary is None else loss + auxiliary).backward()

    def routing_metrics(self, role: Role) -> Mapping[str, Metric]:
        return self._trained[role].expert_load.take()

    def release_gathered(self, role: Role) -> None:
        if role is not Role.REFERENCE or self._node.trainer.lora is not None or self._reference is not None:
            reshard(self._network(role))
        if role in self._trained:
            self._trained[role].expert_load.discard_call()

    def check_alike(self, numbers: Mapping[str, float]) -> None:
        if self._replicas is not None:
            self._replicas.check_alike(numbers)

    def clip_gradients(self, role: Role) -> float:
        if self._replicas is not None:
            self._replicas.add_up([self._trained[role].expert_load.step_counts_LE])
        self._trained[role].first_values.clear_gradients()
        return self._trained[role].optimizer.clip(self._replicas)

    def step_optimizer(self, role: Role, *, learning_rate: float) -> None:
        with self._trained[role].first_values.kept():
            self._trained[role].optimizer.step(learning_rate=learning_rate)
        self._trained[role].expert_load.update_biases()

    def clear_gradients(self, role: Role) -> None:
        self._trained[role].optimizer.clear_gradients()
        self._trained[role].expert_load.step_counts_LE.zero_()

    def reset_optimizer(self, role: Role) -> None:
        self._trained[role].optimizer.reset()

    def warm_up(self) -> None:
        """Compiles for the first passes and, on a GPU, rehearses the first publication.

        Logs if that lacks room. Raises InvalidArgument if layers cannot be compiled.
        """
        if self._compiles:
            self._compile()
        if self.device.type == "cuda":
            self.publication.try_rehearsal()

    def _compile(self) -> None:
        """Runs every kind of pass. A reference with separate weights is compiled at its first use."""
        batch = trial_batch(self.sequence_part, device=self.device)
        with compiling_ahead():
            for role in self._trained:
                self.backward(role, 0.0 * self._scores(role, batch).sum(), share=0.0)
                self.routing_metrics(role)
                self.clear_gradients(role)
            frozen = [Role.REFERENCE] if self._node.trainer.lora is not None else []
            with torch.no_grad():
                for role in (*self._trained, *frozen):
                    self._scores(role, batch)
                    self.release_gathered(role)

    def _scores(self, role: Role, batch: TokenBatch) -> Tensor:
        return self.score_values(batch) if role is Role.CRITIC else self.score_tokens(role, batch)[0]

    def save_checkpoint(self, path: Path, *, progress: Mapping[Role, Progress], save_id: str | None = None) -> int:
        self.memory.wait_for_content()
        return save_checkpoint(path, tensors=training_state(self._trained), facts=self._facts(progress), save_id=save_id)

    def check_checkpoint(self, path: Path) -> Mapping[Role, Progress]:
        return check_checkpoint(path, tensors=training_state(self._trained), have=self._facts()).progress

    def load_checkpoint(self, path: Path, *, progressed: Callable[[], None]) -> Mapping[Role, Progress]:
        self.memory.wait_for_content()
        tensors = training_state(self._trained)
        return load_checkpoint(path, tensors=tensors, have=self._facts(), progressed=progressed).progress

    def export_model(self, path: Path) -> int:
        self.memory.wait_for_content()
        source, dtype, lora = self._node.model.path, getattr(torch, self._node.export_dtype), self._node.trainer.lora
        network, digests = self._policy.causal_lm, self._digests
        return export_model(path, causal_lm=network, source=source, digests=digests, dtype=dtype, lora=lora)

    def close(self) -> None:
        """Closes the export, so that no one else receives the weights, and frees host memory."""
        self.memory.close()
        self.publication.close()
        self._to_close.close()

    def _network(self, role: Role) -> Policy | Critic:
        """The network of a role. The reference is the policy without its adapters, or is loaded at its first use."""
        if role is Role.REFERENCE:
            if self._node.trainer.lora is not None:
                return self._policy
            if self._reference is None:
                self._reference = self._load_reference()
            return self._reference
        return self._trained[role].network

    def _load_reference(self) -> Policy:
        """Raises as HostShards where it stays on the host."""
        source = self._source(self._model_path, lora=None, is_frozen=True)
        if not self._node.reference_is_on_host:
            reference = load_policy(source, region=self._weights()).requires_grad_(False).eval()
            self.memory.guard(groups_of(reference))
            self.memory.freeze(reference.parameters())
            return reference
        with ExitStack() as undo:
            given = "true" if self._node.has_reference else "unset (no KL coefficient in [train])"
            shards = HostShards(self._mesh, setting=f"trainer.reference_on_host = {given}", advice=_HOST_ADVICE)
            undo.callback(shards.close)
            reference = load_policy(replace(source, on_host=shards), region=self._weights()).requires_grad_(False).eval()
            self._to_close.push(undo.pop_all())
            return reference

    def _train(self, network: Policy | Critic, config: OptimizerConfig) -> Trained:
        set_checkpointing(
            network.causal_lm,
            Checkpointing(self._choices.checkpointing),
            kept_layers=self._choices.kept_layers,
            on_host=self._host_activations(network.causal_lm),
        )
        if self._node.trainer.mlp_tile_tokens is not None:
            if self._compiles:
                compile_mlps(network.causal_lm)
            tile_mlps(network.causal_lm, num_tokens=self._node.trainer.mlp_tile_tokens)
        network.train()
        self.memory.guard(groups_of(network))
        self.memory.freeze(param for param in network.parameters() if not param.requires_grad)
        named = list(trained_parameters(network))
        parameters = [param for _, param in named]
        is_8bit, on_host = self._node.trainer.optimizer_8bit, self._node.trainer.optimizer_on_host
        kind = StreamedAdamW if on_host else QuantizedAdamW if is_8bit else ShardedAdamW
        gradients = self.memory.make_gradients(parameters)
        optimizer = kind(parameters, gradients=gradients, config=config, memory=self.memory, mesh=self._mesh)
        self._to_close.callback(optimizer.close)
        is_policy, trainer = isinstance(network, Policy), self._node.trainer
        lora = trainer.lora if is_policy else trainer.critic_lora
        is_pissa = lora is not None and lora.is_pissa
        if is_pissa and self._replicas is not None:
            # Kinds of processors decompose differently.
            self._replicas.share([local_part(parameter) for parameter in parameters])
        first_values = FirstValues(named if is_pissa else (), gradients if is_pissa else ())
        load = ExpertLoad(
            network.causal_lm,
            mesh=self._mesh,
            device=self.device,
            aux_loss_coef=trainer.router_aux_loss_coef if is_policy else 0.0,
            bias_update_rate=trainer.router_bias_update_rate if is_policy else 0.0,
        )
        return Trained(network, optimizer, load, first_values)

    def _host_activations(self, causal_lm: PreTrainedModel) -> HostActivations | None:
        """Host memory for what layers keep, if it is offloaded. Raises as HostActivations."""
        num_layers = causal_lm.config.num_hidden_layers - self._choices.kept_layers
        if self._choices.checkpointing != Checkpointing.OFFLOADED or num_layers < 1:
            return None
        # The passes that compile at the start have this many tokens on each rank, even where a micro-batch has fewer.
        num_tokens = max(self._planned.rank_tokens, TRIAL_TOKENS if self._compiles else 0)
        num_bytes = num_tokens * offloaded_per_token(self._planned)
        activations = HostActivations(self._mesh, num_layers=num_layers, num_bytes=num_bytes)
        self._to_close.callback(activations.close)
        return activations

    def _source(self, path: Path, *, lora: LoraConfig | None, is_frozen: bool = False) -> NetworkSource:
        """Frozen weights are loaded in compute dtype."""
        config = self._node.trainer
        compute_dtype = getattr(torch, config.compute_dtype)
        is_base = is_frozen or lora is not None
        return NetworkSource(
            path=path,
            config=self._model_config if path == self._model_path else read_model_config(path),
            mesh=self._mesh,
            param_dtype=compute_dtype if is_base else getattr(torch, config.param_dtype),
            compute_dtype=compute_dtype,
            attention_backend=config.attention_backend,
            lora=lora,
            seed=self._node.seed,
            sharing=self._sharing,
            compiles=self._compiles,
            expert_parallel=config.expert_parallel,
            prefix_sharing=config.prefix_sharing,
            trains_tower=config.train_tower and not is_base,
        )

    def _weights(self) -> AbstractContextManager[None]:
        return self.memory.region(MemoryTag.WEIGHTS)

    def _facts(self, progress: Mapping[Role, Progress] | None = None) -> CheckpointFacts:
        models = {role: each.network.causal_lm.config for role, each in self._trained.items()}
        return checkpoint_facts(models, progress=progress, config=self._node.trainer, num_ranks=self._mesh.size())

    def _make_export(self, memory: ExportMemory) -> WeightExport:
        """Of the shards in the engine's dtype: adapters only, or merged weights."""
        rank, causal_lm = self._mesh.get_local_rank(), self._policy.causal_lm
        if self._node.trainer.lora is not None and self._node.served_adapter is None:
            self._merged = MergedWeights(causal_lm)
        if self._node.served_adapter is not None:
            published = adapter_shards(causal_lm)
        else:
            published = merged_shards(causal_lm) + (constant_shards(causal_lm) if rank == 0 else [])
        return WeightExport(
            published,
            rank=rank,
            num_ranks=self._mesh.size(),
            dtype=getattr(torch, self._node.rollout.dtype),
            socket_path=socket_dir(self._node.state_dir) / f"weights-{rank}.sock",
            memory=memory,
        )
