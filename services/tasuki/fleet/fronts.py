"""Rollout and trainer of a whole fleet, as its leader serves them beside the fleet's coordinator."""

from __future__ import annotations

from tasuki.config.instance import read_instance
from tasuki.config.places import fleet_calls_path
from tasuki.config.schema import NodeConfig
from tasuki.fleet.calls import Nodes
from tasuki.fleet.rollout_front import CallSeeds, RolloutFront
from tasuki.fleet.trainer_front import TrainerFront
from tasuki.planner.model_shape import read_model_file
from tasuki.rollout.seeds import CallNumbers
from tasuki.rpc.server import RpcServer
from tasuki.trainer.data.cost import SampleCost, sample_cost
from tasuki.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from tasuki.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from tasuki.v1.types_pb2 import ROLE_CRITIC, ROLE_POLICY, ROLE_REFERENCE
from tasuki.v1.types_pb2 import Role as RoleMessage


def add_fronts(server: RpcServer, nodes: Nodes, config: NodeConfig, *, epoch: int) -> None:
    """Adds both services. epoch: of the fleet's coordinator. Raises as read_model_file for the leader's model."""
    calls = CallNumbers(fleet_calls_path(config.state_dir), instance_id=read_instance(config.state_dir).id)
    # SGLang samples by seeds on a CPU alone.
    seeds = CallSeeds(config.rollout.seed, calls) if config.device == "cpu" else None
    server.add(add_RolloutServiceServicer_to_server, RolloutFront(nodes, seeds=seeds), "tasuki.v1.RolloutService")
    trainer = TrainerFront(nodes, epoch=epoch, costs=_costs(config))
    server.add(add_TrainerServiceServicer_to_server, trainer, "tasuki.v1.TrainerService")


def _costs(config: NodeConfig) -> dict[RoleMessage.ValueType, SampleCost]:
    """Of a sample under every role. The critic's differs from the policy's by a factor, which deals samples alike."""
    policy = sample_cost(read_model_file(config.model.path), is_frozen=config.trainer.lora is not None)
    return dict.fromkeys((ROLE_POLICY, ROLE_REFERENCE, ROLE_CRITIC), policy)
