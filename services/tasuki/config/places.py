"""Where a node keeps its files and sockets: one function for each, so that every process agrees."""

from __future__ import annotations

import os
from pathlib import Path

from tasuki.config.schema import NodeConfig
from tasuki.wire.address import socket_folder, unix_target
from tasuki.wire.errors import InvalidArgument


def socket_dir(state_dir: Path) -> Path:
    """Private (0700) folder of a node's sockets, made when missing.

    Raises InvalidArgument when the folder belongs to another user or is a link.
    """
    place = socket_folder(state_dir)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = place.lstat()
    if place.is_symlink() or status.st_uid != os.getuid():
        raise InvalidArgument("state_dir", f"socket folder {place} is a link or belongs to another user")
    place.chmod(0o700)
    return place


def node_targets(config: NodeConfig) -> dict[str, str]:
    """gRPC targets of the node's services on this machine, by name: their unix sockets. Makes no folder."""
    return {name: unix_target(config.state_dir, service=name) for name in ("coordinator", "trainer", "rollout")}


def fleet_target(config: NodeConfig) -> str:
    """gRPC target of the fleet that the node leads, for callers on this machine."""
    return unix_target(config.state_dir, service="fleet")


def client_target(config: NodeConfig) -> str:
    """Where clients on this machine find who decides on phases: the coordinator, or on node 0 of a fleet that of the fleet.

    Raises InvalidArgument on any other node of a fleet.
    """
    if config.fleet is None:
        return node_targets(config)["coordinator"]
    if config.fleet.node_rank:
        leader = config.fleet.leader
        raise InvalidArgument("fleet.node_rank", f"is {config.fleet.node_rank}: clients call node 0, at {leader}")
    return fleet_target(config)


def client_checkpoints_dir(state_dir: Path) -> Path:
    """Where callers at ports may have checkpoints and models written, beside the run's output folder."""
    return state_dir / "checkpoints"


def pulse_dir(state_dir: Path) -> Path:
    """Where the processes of a running node show that they live; made when missing."""
    place = socket_dir(state_dir) / "pulse"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def restart_request_path(state_dir: Path, service: str) -> Path:
    """A file that asks the supervisor to kill the service and restart it; its text is the cause."""
    return socket_dir(state_dir) / f"restart-{service}"


def instance_path(state_dir: Path) -> Path:
    """The name of this start of the node; it goes with the node's sockets."""
    return socket_dir(state_dir) / "instance"


def generate_calls_path(state_dir: Path) -> Path:
    """The generations of the policy version that rollout serves; it goes with the node's sockets."""
    return socket_dir(state_dir) / "generate-calls"


def base_socket_path(state_dir: Path, service: str) -> Path:
    """Where a service hands out the model below adapters, which both read."""
    return socket_dir(state_dir) / f"base-{service}.sock"


def pool_socket_path(state_dir: Path) -> Path:
    """Where processes of the node join its memory pool."""
    return socket_dir(state_dir) / "pool.sock"


def fleet_calls_path(state_dir: Path) -> Path:
    """The generations of the policy version that the fleet serves; as `generate_calls_path`."""
    return socket_dir(state_dir) / "fleet-calls"


def stall_dir(state_dir: Path) -> Path:
    """Stacks of processes that hung, one file for each."""
    return state_dir / "stalls"


def log_path(state_dir: Path, service: str) -> Path:
    return state_dir / "logs" / f"{service}.log"


def journal_path(state_dir: Path) -> Path:
    return state_dir / "journal.sqlite"


def memory_record_path(state_dir: Path) -> Path:
    """What the services said of their memory, over the node's life."""
    return state_dir / "memory.jsonl"


def training_log_path(state_dir: Path) -> Path:
    """What the trainer has done since its last checkpoint."""
    return state_dir / "training.log"


def training_save_path(state_dir: Path) -> Path:
    """The checkpoint that the node has written as its part of a fleet's save."""
    return state_dir / "training.save"


def training_run_path(state_dir: Path) -> Path:
    """The id of the run that trained last on the node; it goes with the training log."""
    return state_dir / "training.run"


def training_output_path(state_dir: Path) -> Path:
    """The output folder of that run."""
    return state_dir / "training.output"


def fleet_journal_path(state_dir: Path) -> Path:
    """On the node that leads a fleet."""
    return state_dir / "fleet.sqlite"


def config_path(state_dir: Path) -> Path:
    """The configuration of the node that runs on the folder, or ran there last, as its services read it."""
    return state_dir / "node.toml"


def archived_config_path(output_dir: Path) -> Path:
    """A copy of that configuration in the archive of a run, whose folder may hold the user's own."""
    return output_dir / "logs" / "node.toml"


REQUESTED_BY = "asked by"
"""How the reason in `exit_path` begins when somebody stopped the node."""


def exit_path(state_dir: Path) -> Path:
    """What the last node on the folder ended with, or ends with."""
    return state_dir / "exit.json"
