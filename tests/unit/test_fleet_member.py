"""Conditions for joining a fleet: same version, configuration, GPUs, model and attempt of the job, and each rank once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasuki.config.schema import FleetConfig, NodeConfig
from tasuki.fleet.membership import config_digest, config_keys, this_member
from tasuki.fleet.nodes import callable_node, check_member
from tasuki.rpc.access import FleetFence, fleet_metadata
from tasuki.rpc.methods import METHODS
from tasuki.v1.fleet_pb2 import FleetCommand, FleetNode, JoinRequest
from tasuki.wire.errors import FleetMismatch, InvalidArgument, PathNotFound
from tests.refusal import refusing

CONFIG = FleetConfig(name="run-1", num_nodes=4, node_rank=0, leader="10.0.0.1:50050", attempt=2)
PACKAGES = {"torch": "2.11.0", "nvidia-nccl-cu13": "2.28.9"}
LEADER = FleetNode(
    boot_id="b0", coordinator_target="10.0.0.1:1", trainer_target="10.0.0.1:2", rollout_target="10.0.0.1:3", version="0.1.0",
    config_digest="c", num_ranks=8, num_gpus=8, model_digest="m", packages=PACKAGES,
)  # fmt: skip


def replace(node: FleetNode, **changed: Any) -> FleetNode:
    found = FleetNode()
    found.CopyFrom(node)
    for field in changed:
        found.ClearField(field)
    found.MergeFrom(FleetNode(**changed))
    return found


NODE = replace(LEADER, node_rank=3, boot_id="b3")


def join(member: FleetNode = NODE, **changed: Any) -> None:
    given = {"num_nodes": 4, "name": "run-1", "attempt": 2, **changed}
    check_member(JoinRequest(node=member, **given), LEADER, config=CONFIG)


@pytest.mark.parametrize(
    ("of_node", "of_request", "field", "words"),
    [
        ({"version": "0.2.0"}, {}, "version", "has 0.2.0, the fleet has 0.1.0; install"),
        ({"num_gpus": 0}, {}, "num_gpus", "has 0, the fleet has 8"),
        ({"model_digest": "n"}, {}, "model_digest", "node 3 has a different model from the leader; give all nodes the same model folder"),
        ({"packages": {**PACKAGES, "nvidia-nccl-cu13": "2.27.5"}}, {}, "packages", "2.27.5, the fleet has nvidia-nccl-cu13 2.28.9"),
        ({"packages": {"torch": "2.11.0"}}, {}, "packages", "has nvidia-nccl-cu13 none, the fleet has nvidia-nccl-cu13 2.28.9; install"),
        ({}, {"name": "run-2"}, "name", "start all nodes with the same [fleet]"),
        ({}, {"num_nodes": 2}, "num_nodes", "has 2, the fleet has 4"),
        ({"node_rank": 4}, {}, "node_rank", "has 4, the fleet has below 4"),
    ],
)  # fmt: skip
def test_a_node_that_differs_is_refused_by_field(of_node: dict[str, Any], of_request: dict[str, Any], field: str, words: str):
    join()
    member = replace(NODE, **of_node)
    with pytest.raises(FleetMismatch) as refused:
        join(member, **of_request)
    assert (refused.value.metadata["field"], refused.value.metadata["node_rank"]) == (field, str(member.node_rank))
    assert words in refused.value.message


def test_an_address_that_listens_everywhere_is_that_of_the_caller() -> None:
    told = replace(NODE, coordinator_target="0.0.0.0:50051", rollout_target="[::]:50053")
    found = callable_node(told, peer="ipv4:10.0.0.4:4711")
    assert (found.coordinator_target, found.rollout_target) == ("10.0.0.4:50051", "10.0.0.4:50053")
    assert found.trainer_target == NODE.trainer_target


@pytest.mark.parametrize(
    ("certified", "host"),
    [
        (["node-a", "node-b", "localhost", "spiffe://tasuki/role/peer"], "node-b"),
        (["node-a", "10.0.0.4"], "10.0.0.4"),
        (["*.tasuki"], "w-1.tasuki"),
    ],
)
def test_an_address_that_listens_everywhere_gets_a_name_of_the_certificate(certified: list[str], host: str) -> None:
    known = {"node-a": {"10.0.0.3"}, "node-b": {"10.0.0.9", "10.0.0.4"}, "w-1.tasuki": {"10.0.0.4"}, "localhost": {"127.0.0.1"}}
    told = replace(NODE, coordinator_target="0.0.0.0:50051", host="w-1")

    def found(names: list[str]) -> FleetNode:
        return callable_node(
            told, peer="ipv4:10.0.0.4:4711", certified=names, resolve=lambda name: known.get(name, frozenset())
        )

    assert found(certified).coordinator_target == f"{host}:50051"
    assert found(certified).trainer_target == NODE.trainer_target
    with refusing("coordinator_target", match="tasuki certs --host"):
        found(["node-a", "localhost"])


@pytest.mark.parametrize("target", ["unix:/run/trainer.sock", "127.0.0.1:50052", ""])
def test_an_address_that_the_leader_cannot_call_is_refused(target: str) -> None:
    with refusing("trainer_target"):
        callable_node(replace(NODE, trainer_target=target), peer="ipv4:10.0.0.4:4711")


def node_config(folder: Path, rank: int, **changed: Any) -> NodeConfig:
    tables = {
        "state_dir": folder / str(rank),
        "model": {"path": folder / f"model-{rank}"},
        "listen": f"127.0.0.1:{50050 + rank}",
        "security": {"insecure": True},
        "fleet": {"name": "f", "num_nodes": 2, "node_rank": rank, "leader": "127.0.0.1:50040"},
    }
    return NodeConfig.model_validate({**tables, **changed})


def test_digests_of_configurations_leave_out_what_is_a_nodes_own(tmp_path: Path) -> None:
    first = config_keys(node_config(tmp_path, 0))
    assert config_keys(node_config(tmp_path, 1, metrics={"listen": "127.0.0.1:9464"})) == first
    other = config_keys(node_config(tmp_path, 1, seed=1))
    assert {key for key in first if first[key] != other[key]} == {"seed"}
    assert config_digest(other) != config_digest(first)


def test_a_node_without_a_model_is_no_member(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match=r"config\.json"):
        this_member(node_config(tmp_path, 0), boot_id="b")


def test_a_node_without_a_fleet_takes_no_commands_of_one() -> None:
    context = SimpleNamespace(invocation_metadata=lambda: fleet_metadata(FleetCommand(name="f")))
    fence, method = FleetFence(None), METHODS["/tasuki.v1.CoordinatorService/Acquire"]
    fence.check(method, SimpleNamespace(invocation_metadata=lambda: ()))
    with pytest.raises(InvalidArgument, match="belongs to no fleet"):
        fence.check(method, context)
