"""A node's place in a fleet of nodes."""

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
    """The fleet of this node; see docs/fleet.md. `tasuki fleet up` fills it from the variables of Slurm, Kubernetes or torchrun."""

    name: Annotated[str, AfterValidator(_check_name)]
    """Name of the fleet, the same on all its nodes: letters, digits, ".", "_" and "-"."""
    num_nodes: PositiveInt
    """Nodes of the fleet, the same on all of them."""
    node_rank: int = Field(ge=0)
    """This node's place among them. Node 0 leads."""
    leader: Annotated[str, AfterValidator(_check_address)]
    """HOST:PORT of the fleet's port on node 0: clients, nodes and the trainers' ranks meet there."""
    attempt: int = Field(default=0, ge=0)
    """Restarts of the job: Slurm's restart count, JobSet's restart-attempt label. A node refuses a smaller one."""
    interface: str | None = None
    """Network interface of gradients between nodes, such as "eth0"; by default NCCL and gloo choose."""
    node_timeout_s: PositiveFloat = 30.0
    """A node that is silent for so long is lost, and the job ends."""

    @model_validator(mode="after")
    def _rank_is_of_a_node(self) -> FleetConfig:
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"node_rank = {self.node_rank} needs num_nodes > {self.node_rank}, but it is {self.num_nodes}")
        return self
