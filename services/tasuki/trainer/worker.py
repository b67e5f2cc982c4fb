"""What one trainer rank owns and does: policy, optimizer, policy version. Every rank makes the same calls in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tasuki.algorithms.losses import policy_loss_sums
from tasuki.config.places import socket_dir
from tasuki.config.schema import LoraConfig, NodeConfig
from tasuki.memory.arena import set_host_budget
from tasuki.memory.tags import MemoryTag
from tasuki.trainer.backends.fsdp import checkpoint, export
from tasuki.trainer.backends.fsdp.lora import adapters_off, merged_rows, trained_parameters
from tasuki.trainer.backends.fsdp.memory import ExportChoice, TrainerMemory
from tasuki.trainer.backends.fsdp.mesh import mesh_device
from tasuki.trainer.backends.fsdp.model import Policy, load_policy, read_model_config
from tasuki.trainer.backends.fsdp.shards import adapter_shards, local_shards
from tasuki.trainer.data.micro_batch import LossBatch, TokenBatch
from tasuki.trainer.lr_schedule import learning_rate_at
from tasuki.transport.export import ExportMemory, WeightExport
from tasuki.v1.weights_pb2 import WeightHandle
from tasuki.wire.errors import GradientsNotFinite


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """The loss of one ForwardBackward."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class LossReport:
    """This rank's part of a call's means: already divided by the counts of the whole call, so the parts add up."""

    loss: float
    clip_fraction: float
    ref_kl: float
    entropy: float
    mean_log_prob_gap: float
    max_log_prob_gap: float
    """The one that does not add up: the call's is the greatest."""


@dataclass(frozen=True, slots=True)
class StepReport:
    policy_version: int
    grad_norm: float
    """L2 norm over all ranks before clipping."""
    learning_rate: float


@dataclass(frozen=True, slots=True)
class PublishReport:
    handle: WeightHandle
    num_bytes: int


class Worker:
    """One rank's share of the training state."""

    def __init__(self, node: NodeConfig, *, mesh: DeviceMesh, progressed: Callable[[], None] = lambda: None) -> None:
        """Loads the start weights. Raises what model.read_model_config and shards.load_shards raise.

        progressed: called after each micro-batch.
        """
        config = node.trainer
        self._progressed = progressed
        self.node, self.config, self.mesh, self.device = node, config, mesh, mesh_device(mesh)
        self.model_config = read_model_config(node.model.path)
        self.policy_version = 0
        self.has_gradients = False
        torch.manual_seed(config.seed)
        if node.memory.host_budget_bytes is not None:
            set_host_budget(node.memory.host_budget_bytes // mesh.size())
        self.memory = TrainerMemory(mesh, ExportChoice.of(node, mesh))
        # A frozen base is only computed with.
        dtype = getattr(torch, config.param_dtype) if config.lora is None else self._compute_dtype
        self.policy = self._load(dtype, lora=config.lora)
        trained = [param for _, param in trained_parameters(self.policy.causal_lm)]
        if config.gradient_checkpointing:
            self.policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy.train()
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self.memory.make_gradients(trained)
        self.memory.make_adamw_state(self.optimizer)
        self._reference: Policy | None = None
        self._export: WeightExport | None = None

    def forward_backward(
        self, micro_batches: Sequence[LossBatch], *, loss: PolicyLossConfig, num_loss_tokens: float, num_gap_tokens: int
    ) -> LossReport:
        """Adds the gradients of the loss over this rank's micro-batches.

        num_loss_tokens, num_gap_tokens: counted tokens of the whole call, over all ranks.
        """
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        max_gap = torch.zeros((), dtype=torch.float32, device=self.device)
        for index, batch in enumerate(micro_batches):
            # Gradients stay whole on each rank until the last micro-batch sums them over the ranks.
            cast(FSDPModule, self.policy).set_requires_gradient_sync(index == len(micro_batches) - 1)
            log_probs_T, entropy_T = self._score(self.policy, batch.tokens, temperature=loss.temperature)
            part = policy_loss_sums(
                log_probs_T,
                rollout_log_probs_T=batch.rollout_log_probs_T,
                advantages_T=batch.advantages_T,
                loss_mask_T=batch.loss_mask_T,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                ref_log_probs_T=batch.ref_log_probs_T,
                kl_coef=loss.kl_coef,
            )
            (part.loss / num_loss_tokens).backward()
            gap_T = (log_probs_T.detach() - batch.rollout_log_probs_T).abs() * batch.loss_mask_T * batch.is_current_T
            entropy = torch.dot(entropy_T, batch.loss_mask_T)
            sums += torch.stack((part.loss.detach(), part.num_clipped, part.ref_kl, entropy, gap_T.sum()))
            max_gap = torch.maximum(max_gap, gap_T.max()) if len(gap_T) else max_gap
            self._progressed()
        self.has_gradients = True
        loss_sum, num_clipped, ref_kl, entropy_sum, gap_sum = sums.tolist()
        return LossReport(
            loss=loss_sum / num_loss_tokens,
            clip_fraction=num_clipped / num_loss_tokens,
            ref_kl=ref_kl / num_loss_tokens,
            entropy=entropy_sum / num_loss_tokens,
            mean_log_prob_gap=gap_sum / max(1, num_gap_tokens),
            max_log_prob_gap=float(max_gap),
        )

    def optim_step(self, *, learning_rate: float | None) -> StepReport:
        """Clips, steps, clears the gradients and adds 1 to the policy version.

        learning_rate: instead of the schedule's. Raises GradientsNotFinite, on every rank, with parameters and version unchanged.
        """
        local_grads = self.memory.gradients
        grad_norm = self._grad_norm(local_grads)
        if not math.isfinite(grad_norm):
            self.discard_gradients()
            raise GradientsNotFinite(f"gradient norm is {grad_norm}; no step was made", grad_norm=grad_norm)
        if grad_norm > self.config.max_grad_norm:
            torch._foreach_mul_(local_grads, self.config.max_grad_norm / (grad_norm + 1e-6))
        rate = self._scheduled_rate() if learning_rate is None else learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.memory.wait_for_optimizer()
        self.optimizer.step()
        self.discard_gradients()
        self.policy_version += 1
        return StepReport(policy_version=self.policy_version, grad_norm=grad_norm, learning_rate=rate)

    def discard_gradients(self) -> None:
        self.memory.clear_gradients()
        self.has_gradients = False

    def policy_log_probs(self, batches: Sequence[TokenBatch], *, temperature: float) -> list[list[float]]:
        """Log-probs of the completion tokens of every sample, in the order of the batches."""
        return self._log_probs(self.policy, batches, temperature=temperature)

    def reference_log_probs(self, batches: Sequence[TokenBatch], *, temperature: float) -> list[list[float]]:
        """The same under the frozen start weights: the policy's own below its adapters, or loaded at their first use."""
        if self.config.lora is not None:
            with adapters_off(self.policy.causal_lm):
                return self._log_probs(self.policy, batches, temperature=temperature)
        if self._reference is None:
            self._reference = self._load(self._compute_dtype).requires_grad_(False).eval()
        return self._log_probs(self._reference, batches, temperature=temperature)

    def publish_weights(self) -> PublishReport:
        """Has this rank's shards, in the engine's dtype, where rollout can map them: the adapters alone, or weights with them added.

        Raises OutOfGpuMemory.
        """
        self._export = self.memory.export(self._make_export)
        replaced = () if self.node.served_adapter is not None else merged_rows(self.policy.causal_lm)
        num_bytes = self._export.publish(self.policy_version, replaced=replaced)
        return PublishReport(handle=self._export.handle(), num_bytes=num_bytes)

    def damage_published(self) -> None:
        """A fault that a test of recovery asked for."""
        assert self._export is not None
        self._export.damage()

    def withdraw_weights(self) -> None:
        if self._export is not None:
            self._export.withdraw()

    def save_checkpoint(self, path: Path) -> int:
        """Returns the bytes written; raises as checkpoint.save_checkpoint."""
        self.memory.wait_for_optimizer()
        return checkpoint.save_checkpoint(path, model=self.policy.causal_lm, optimizer=self.optimizer, facts=self._facts())

    def load_checkpoint(self, path: Path) -> None:
        """Raises as checkpoint.load_checkpoint, with nothing changed. Clears the gradients."""
        self.memory.wait_for_optimizer()
        self.policy_version = checkpoint.load_checkpoint(
            path, model=self.policy.causal_lm, optimizer=self.optimizer, have=self._facts()
        )
        self.discard_gradients()

    def export_model(self, path: Path) -> int:
        """Returns the bytes written; raises as export.export_model."""
        return export.export_model(path, causal_lm=self.policy.causal_lm, source=self.node.model.path)

    def close(self) -> None:
        """Ends the export: nobody new gets the weights."""
        if self._export is not None:
            self._export.close()

    def _make_export(self, memory: ExportMemory) -> WeightExport:
        rank, causal_lm = self.mesh.get_local_rank(), self.policy.causal_lm
        return WeightExport(
            local_shards(causal_lm) if self.node.served_adapter is None else adapter_shards(causal_lm),
            rank=rank,
            num_ranks=self.mesh.size(),
            dtype=getattr(torch, self.node.rollout.dtype),
            socket_path=socket_dir(self.node.state_dir) / f"weights-{rank}.sock",
            memory=memory,
        )

    @torch.no_grad()
    def _log_probs(self, policy: Policy, batches: Sequence[TokenBatch], *, temperature: float) -> list[list[float]]:
        scored: list[list[float]] = []
        for batch in batches:
            log_probs_T, _ = self._score(policy, batch, temperature=temperature)
            scored.extend(sample.tolist() for sample in log_probs_T.split(list(batch.num_completion_tokens)))
            self._progressed()
        # Without a backward pass FSDP2 leaves the root's parameters gathered, in place of their shards.
        cast(FSDPModule, policy).reshard()
        return scored

    def _score(self, policy: Policy, batch: TokenBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
        return policy(batch.input_ids_BL, batch.positions_T, batch.token_ids_T, temperature)

    def _grad_norm(self, local_grads: list[Tensor]) -> float:
        """L2 norm over all ranks."""
        norms = torch.stack(torch._foreach_norm(local_grads, dtype=torch.float32)).to(torch.float64)
        square = norms.square().sum()
        dist.all_reduce(square, group=self.mesh.get_group("dp"))
        return math.sqrt(float(square))

    def _scheduled_rate(self) -> float:
        config = self.config
        return learning_rate_at(
            self.policy_version,
            peak=config.learning_rate,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            total_steps=config.total_steps,
        )

    def _facts(self) -> checkpoint.CheckpointFacts:
        architectures = self.model_config.architectures
        assert architectures, "the model was loaded by its architecture"
        return checkpoint.CheckpointFacts(
            policy_version=self.policy_version,
            num_ranks=self.mesh.size(),
            architecture=architectures[0],
            lora_rank=None if self.config.lora is None else self.config.lora.rank,
        )

    def _load(self, param_dtype: torch.dtype, *, lora: LoraConfig | None = None) -> Policy:
        return load_policy(
            self.node.model.path,
            config=self.model_config,
            mesh=self.mesh,
            param_dtype=param_dtype,
            compute_dtype=self._compute_dtype,
            region=self.memory.region(MemoryTag.WEIGHTS),
            lora=lora,
            seed=self.config.seed,
        )

    @property
    def _compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.config.compute_dtype)
