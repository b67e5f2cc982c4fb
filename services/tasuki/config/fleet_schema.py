"""The table of a node in a fleet."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from tasuki.config.table import Schema
from tasuki.wire.address import split_host_port

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _check_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError('must begin with a letter or a digit, and have up to 128 letters, digits, ".", "_" and "-"')
    return name


def _check_address(address: str) -> str:
    split_host_port(address)
    return address


class FleetConfig(Schema):
    """The node's fleet; see docs/fleet.md. `tasuki fleet up` fills it in from the variables of Slurm, Kubernetes or torchrun."""

    name: Annotated[str, AfterValidator(_check_name)]
    """Name of the fleet, the same on all nodes: letters, digits, ".", "_" and "-"."""
    num_nodes: PositiveInt
    """Number of nodes, the same on all nodes."""
    node_rank: int = Field(ge=0)
    """Rank of this node. Node 0 leads."""
    leader: Annotated[str, AfterValidator(_check_address)]
    """HOST:PORT of the fleet on node 0, used by clients, nodes and the trainers' ranks."""
    attempt: int = Field(default=0, ge=0)
    """Number of restarts of the job: Slurm's restart count, JobSet's restart-attempt label. Nodes refuse smaller numbers."""
    interface: str | None = None
    """Network interface for gradients between nodes, such as "eth0". By default gloo takes the one that routes to the leader, and NCCL
    NCCL_SOCKET_IFNAME or its own choice."""
    node_timeout_s: PositiveFloat = 30.0
    """A node silent for this long is considered lost, and the job ends."""

    @model_validator(mode="after")
    def _rank_is_of_a_node(self) -> FleetConfig:
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"node_rank = {self.node_rank} needs num_nodes > {self.node_rank}, but it is {self.num_nodes}")
        return self
