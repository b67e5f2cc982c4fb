"""Inputs of micro-batch planning: tokens per micro-batch, and the cost of a sample under each role."""

from __future__ import annotations

from dataclasses import replace

from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.planner.model_shape import read_model_file
from tasuki.planner.node_plan import node_layout
from tasuki.trainer.data.cost import SampleCost, sample_cost
from tasuki.trainer.ranks.front import TrainerRanks
from tasuki.trainer.roles import Role
from tasuki.v1.memory_pb2 import GetUsageRequest
from tasuki.v1.ranks_pb2 import TrainerRankCommand


async def micro_batch_tokens(config: NodeConfig, ranks: TrainerRanks) -> int:
    """The configured value, or the planner's choice for the smallest GPU of the ranks. Raises as node_layout."""
    if config.device == "cpu" or config.trainer.micro_batch_tokens is not None:
        return config.most_micro_batch_tokens
    answers = await ranks.call(TrainerRankCommand(get_usage=GetUsageRequest()))
    gpu_bytes = min(device.total_bytes for answer in answers for device in answer.get_usage.devices)
    shape = read_model_file(config.model.path).shape
    return node_layout(config, shape, gpu_bytes=gpu_bytes, host_bytes=host_memory().total_bytes).micro_batch_tokens


def sample_costs(config: NodeConfig) -> dict[Role, SampleCost]:
    """Cost of a sample under every role. Raises as read_model_file."""
    trainer, policy = config.trainer, read_model_file(config.model.path)
    costs = {
        Role.POLICY: sample_cost(policy, is_frozen=trainer.lora is not None),
        Role.REFERENCE: sample_cost(policy),
    }
    if trainer.critic is not None:
        critic = policy if trainer.critic.path is None else read_model_file(trainer.critic.path)
        valued = replace(critic, shape=replace(critic.shape, is_critic=True))
        costs[Role.CRITIC] = sample_cost(valued, is_frozen=trainer.critic_lora is not None)
    return costs
