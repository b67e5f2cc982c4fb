"""Networks with their optimizers, and their checkpointed state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from tasuki.config.trainer_schema import TrainerConfig
from tasuki.models.families import FAMILIES
from tasuki.models.family import computing_keys
from tasuki.trainer.backend import LearnerFacts
from tasuki.trainer.backends.fsdp.checkpoint import CheckpointFacts, RoleFacts, training_tensors
from tasuki.trainer.backends.fsdp.model import Critic, Policy
from tasuki.trainer.backends.fsdp.optimizer.adamw import ShardedAdamW
from tasuki.trainer.modules.routing import ExpertLoad
from tasuki.trainer.roles import Role


@dataclass(frozen=True, slots=True)
class Trained:
    """A network and its optimizer."""

    network: Policy | Critic
    optimizer: ShardedAdamW
    expert_load: ExpertLoad


def training_state(trained: Mapping[Role, Trained]) -> dict[str, Tensor]:
    """Every tensor of the trained networks and their optimizers, by name."""
    for each in trained.values():
        each.optimizer.settle()
    return {
        f"{role}.{name}": tensor
        for role, each in trained.items()
        for name, tensor in training_tensors(each.network, each.optimizer.optimizer).items()
    }


def checkpoint_facts(
    trained: Mapping[Role, Trained], *, facts: LearnerFacts, config: TrainerConfig, num_ranks: int
) -> CheckpointFacts:
    """Facts to store in a checkpoint. config: of the networks."""
    configs = {Role.POLICY: config.lora}
    if config.critic is not None:
        configs[Role.CRITIC] = config.critic_lora
    roles: dict[Role, RoleFacts] = {}
    for role, lora in configs.items():
        model = trained[role].network.causal_lm.config
        assert model.architectures, "the model was loaded by its architecture"
        rank, alpha = (None, None) if lora is None else (lora.rank, lora.alpha)
        roles[role] = RoleFacts(
            facts.versions[role],
            facts.schedule_starts[role],
            model.architectures[0],
            lora_rank=rank,
            lora_alpha=alpha,
            model=_computing_settings(model),
        )
    return CheckpointFacts(num_ranks, roles, config.optimizer_8bit)


def _computing_settings(model: PreTrainedConfig) -> dict[str, Any]:
    """Values of config.json on which results depend, as JSON; transformers has filled in the defaults."""
    assert model.architectures
    keys = computing_keys(FAMILIES[model.architectures[0]])
    return json.loads(json.dumps({key: value for key, value in model.to_dict().items() if key in keys}))


def learner_facts(facts: CheckpointFacts) -> LearnerFacts:
    """The learner's part of the facts."""
    return LearnerFacts(
        versions={role: each.version for role, each in facts.roles.items()},
        schedule_starts={role: each.schedule_start for role, each in facts.roles.items()},
    )
