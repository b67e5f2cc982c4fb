"""A learner over FSDP2 ranks without a service, and calls cut into micro-batches as the service cuts them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tasuki.algorithms.aggregation import denominator
from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.config.schema import NodeConfig
from tasuki.trainer.backends.fsdp.backend import FsdpBackend
from tasuki.trainer.backends.fsdp.checkpoint import Trained
from tasuki.trainer.data.cost import SampleCost
from tasuki.trainer.data.micro_batch import MicroBatch, micro_batch
from tasuki.trainer.data.plan import Sharing, plan_shared
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.learner import Learner, trained_roles
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role, merge_parts
from tasuki.v1.ranks_pb2 import RankLossReport
from tests.choices import choices_for
from tests.integration.plain_critic import value_samples

# In these tests' models the cost of a sample is its number of tokens.
COST = SampleCost(linear=1.0, quadratic=0.0)


def start_learner(
    model: Path,
    *,
    mesh: DeviceMesh,
    state_dir: Path | None = None,
    rollout: Mapping[str, Any] | None = None,
    export_stays: bool = True,
    choices: Mapping[str, object] = MappingProxyType({}),
    **trainer: Any,
) -> Learner:
    """Starts a learner in float32, unless `trainer`, the settings of that table, says otherwise. choices: replace the planner's.
    state_dir: the model's folder by default."""
    tables = {
        "device": mesh.device_type,
        "trainer": {"num_ranks": mesh.size(), "compute_dtype": "float32", **trainer},
        "rollout": rollout or {},
    }
    node = NodeConfig.model_validate({"state_dir": state_dir or model, "model": {"path": model}, **tables})
    is_skipping = node.trainer.on_non_finite == "skip"
    chosen = choices_for(node, export_stays=export_stays, **choices)
    if node.trainer.backend == "megatron":
        from tasuki.trainer.backends.megatron.backend import MegatronBackend

        return Learner(MegatronBackend(node, chosen, mesh=mesh), optimizers=trained_roles(node.trainer))
    backend = FsdpBackend(node, chosen, mesh=mesh)
    return Learner(backend, optimizers=trained_roles(node.trainer), skips_non_finite=is_skipping)


def fsdp(learner: Learner) -> FsdpBackend:
    assert isinstance(learner.backend, FsdpBackend)
    return learner.backend


def trained(learner: Learner, role: Role) -> Trained:
    """Returns the role's network and optimizer."""
    return fsdp(learner)._trained[role]


def micro_batches(learner: Learner, samples: Samples, *, config: LossConfig, max_tokens: int) -> list[MicroBatch]:
    """Returns this rank's micro-batches. config: including its denominator."""
    trainer = cast(Any, learner.backend)._node.trainer
    num_groups = learner.backend.num_ranks // trainer.ranks_per_micro_batch
    sharing = Sharing.ALWAYS if trainer.prefix_sharing is True else Sharing.NEVER
    samples, plan = plan_shared(samples, num_ranks=num_groups, max_tokens=max_tokens, cost=COST, sharing=sharing)
    version, device = learner.policy_version, learner.backend.device
    return [
        micro_batch(
            samples.select(indices),
            config=config,
            policy_version=version,
            device=device,
            part=learner.backend.sequence_part,
        )
        for indices in plan[dist.get_rank() // trainer.ranks_per_micro_batch]
    ]


def with_denominator(config: LossConfig, samples: Samples) -> LossConfig:
    """Returns `config` with the denominator of a call with these samples alone."""
    return replace(config, denominator=denominator(samples.columns["loss_mask"], samples.num_completion_S, config=config))


def learn(learner: Learner, role: Role, samples: Samples, *, config: LossConfig, max_tokens: int = 4096) -> RankLossReport:
    """Makes one call in micro-batches of at most `max_tokens` tokens; returns its report over all ranks."""
    config = config if config.denominator is not None else with_denominator(config, samples)
    batches = micro_batches(learner, samples, config=config, max_tokens=max_tokens)
    report = learner.forward_backward(role, batches, config=config)
    num_sharing = cast(Any, learner.backend)._node.trainer.ranks_per_micro_batch
    return whole_report(report, num_sharing=num_sharing)


def whole_report(mine: RankLossReport, *, num_sharing: int = 1) -> RankLossReport:
    """Joins the ranks' reports into that of the call; each `num_sharing` consecutive ranks report the same."""
    reports: list[RankLossReport] = [mine] * dist.get_world_size()
    dist.all_gather_object(reports, mine)
    reports = reports[::num_sharing]
    metrics = merge_parts([report.metrics for report in reports])
    return RankLossReport(loss=sum(report.loss for report in reports), metrics=metrics)


def metric(report: RankLossReport, name: str) -> float:
    """Returns a figure of a report over all ranks."""
    part = report.metrics[name]
    return part.total if part.is_maximum else part.total / part.weight


def whole_gradients(learner: Learner, role: Role) -> dict[str, Tensor]:
    """Returns gradients by parameter name; every rank must call it."""
    gradients: dict[str, Tensor] = {}
    for name, param in trained(learner, role).network.named_parameters():
        if param.requires_grad:
            assert param.grad is not None
            gradients[name.removeprefix("causal_lm.")] = cast(DTensor, param.grad).full_tensor().clone()
    return gradients


def whole_parameters(learner: Learner, role: Role) -> dict[str, Tensor]:
    """Returns parameters by name; every rank must call it."""
    return {
        name.removeprefix("causal_lm."): cast(DTensor, param.detach()).full_tensor().clone()
        for name, param in trained(learner, role).network.named_parameters()
    }


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


LOSSES = {Role.POLICY: LossConfig(), Role.CRITIC: LossConfig(loss=ValueLoss())}


def train(learner: Learner, num_steps: int) -> None:
    """Makes steps of policy and critic, with the same samples."""
    samples = decode_samples(value_samples(9))
    for _ in range(num_steps):
        for role, config in LOSSES.items():
            learn(learner, role, samples, config=config)
            learner.optim_step(role)
