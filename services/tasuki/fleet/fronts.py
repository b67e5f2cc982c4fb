"""Rollout and trainer services of the whole fleet, served by its leader next to the fleet's coordinator."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.config.instance import read_instance
from tasuki.config.places import fleet_calls_path
from tasuki.config.schema import NodeConfig
from tasuki.fleet.calls import Nodes
from tasuki.fleet.rollout_front import CallSeeds, RolloutFront
from tasuki.fleet.trainer_front import Deal, TrainerFront
from tasuki.planner.model_shape import read_model_file
from tasuki.rollout.seeds import CallNumbers
from tasuki.rpc.server import RpcServer
from tasuki.trainer.data.cost import sample_cost
from tasuki.trainer.data.shares import deal_samples
from tasuki.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from tasuki.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server


def add_fronts(server: RpcServer, nodes: Nodes, config: NodeConfig, *, epoch: int) -> None:
    """Adds both services. epoch: of the fleet's coordinator. Raises as read_model_file for the leader's model."""
    calls = CallNumbers(fleet_calls_path(config.state_dir), instance_id=read_instance(config.state_dir).id)
    # SGLang uses seeds on a CPU only.
    seeds = CallSeeds(config.rollout.seed, calls) if config.device == "cpu" else None
    server.add(add_RolloutServiceServicer_to_server, RolloutFront(nodes, seeds=seeds), "tasuki.v1.RolloutService")
    trainer = TrainerFront(nodes, epoch=epoch, deal=sample_dealer(config, num_nodes=nodes.num_nodes))
    server.add(add_TrainerServiceServicer_to_server, trainer, "tasuki.v1.TrainerService")


def sample_dealer(config: NodeConfig, *, num_nodes: int) -> Deal:
    """Distributes samples by their cost under the policy. Under other roles it differs only by a constant factor."""
    trainer = config.trainer
    cost = sample_cost(read_model_file(config.model.path), is_frozen=trainer.lora is not None)
    num_ranks = trainer.num_ranks // trainer.sequence_parallel

    def deal(lengths: Sequence[int], completions: Sequence[int]) -> list[list[int]]:
        # Samples that are too long are refused by their node.
        most = max(config.most_micro_batch_tokens, *lengths)
        return deal_samples(
            lengths, completions=completions, num_nodes=num_nodes, num_ranks=num_ranks, max_tokens=most, cost=cost
        )

    return deal
