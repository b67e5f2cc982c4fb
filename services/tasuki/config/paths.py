"""Paths of a node's files and sockets, one function each, so that all processes agree."""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from tasuki.config.schema import SERVICES, NodeConfig
from tasuki.wire.address import socket_folder, unix_target
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.owner import is_foreign


def socket_dir(state_dir: Path) -> Path:
    """Private (0700) folder of a node's sockets, created if missing.

    Raises InvalidArgument if the folder belongs to another user or is a link.
    """
    place = socket_folder(state_dir)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = place.lstat()
    if place.is_symlink() or status.st_uid != os.getuid():
        raise InvalidArgument("state_dir", f"socket folder {place} is a link or belongs to another user")
    place.chmod(0o700)
    return place


def check_owner(state_dir: Path) -> None:
    """Raises InvalidArgument for a state folder, if it exists, in which another user could replace sockets and configuration.

    A folder of root's may be open to all: a pod's volume is, and no other user sees it.
    """
    if not state_dir.exists():
        return
    place = state_dir.resolve()
    if is_foreign(place):
        raise InvalidArgument(
            "state_dir", f"{place} belongs to another user, who could run code in the node; choose your own folder"
        )
    status = place.stat()
    if status.st_mode & stat.S_IWOTH and status.st_uid == os.geteuid():
        raise InvalidArgument("state_dir", f"every user of the machine can write to {place}; chmod o-w {place}")


def readable_by_others(folder: Path) -> str:
    """Says that other users may list the folder; empty if they may not, or there is none. Its files are private."""
    mode = stat.S_IMODE(folder.stat().st_mode) if folder.is_dir() else 0
    return f"others may list {folder} ({mode:04o}): chmod go-rwx {folder}" if mode & 0o077 else ""


def node_targets(config: NodeConfig) -> dict[str, str]:
    """gRPC targets of the node's unix sockets, by service. Creates no folder."""
    return {name: unix_target(config.state_dir, service=name) for name in SERVICES}


def fleet_target(config: NodeConfig) -> str:
    """gRPC target of the fleet led by this node, for callers on this machine."""
    return unix_target(config.state_dir, service="fleet")


def client_target(config: NodeConfig) -> str:
    """gRPC target for clients on this machine: the coordinator or, on node 0 of a fleet, the fleet.

    Raises InvalidArgument on any other node of a fleet.
    """
    if config.fleet is None:
        return node_targets(config)["coordinator"]
    if config.fleet.node_rank:
        leader = config.fleet.leader
        raise InvalidArgument("fleet.node_rank", f"is {config.fleet.node_rank}: clients call node 0, at {leader}")
    return fleet_target(config)


def pulse_dir(state_dir: Path) -> Path:
    """Folder of heartbeats of a running node's processes, created if missing."""
    place = socket_dir(state_dir) / "pulse"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def model_copy_dir(state_dir: Path) -> Path:
    """Private (0700) folder in shared memory of a running node's copy of its model. Creates no folder."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(state_dir))).hexdigest()[:16]
    return Path("/dev/shm") / f"tasuki-model-{os.getuid()}-{digest}"  # noqa: S108 - its owner and mode are checked


def model_source(config: NodeConfig) -> Path:
    """Folder in which services read the model's weights: the node's copy, or `model.path` if there is none of this user."""
    place = model_copy_dir(config.state_dir)
    if not place.exists():
        return config.model.path
    status = place.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return place if is_private else config.model.path


def restart_request_path(state_dir: Path, service: str) -> Path:
    """File that asks the supervisor to kill and restart the service; it contains the reason."""
    return socket_dir(state_dir) / f"restart-{service}"


def engine_dir(state_dir: Path) -> Path:
    """Folder of the engine's own sockets and files, which rollout empties when it starts and removes when it ends."""
    return socket_dir(state_dir) / "tmp"


def engine_metrics_dir(state_dir: Path) -> Path:
    """Folder of the engine's own metrics, created if missing."""
    place = engine_dir(state_dir) / "metrics"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def base_socket_path(state_dir: Path, service: str, rank: int = 0) -> Path:
    """Where a rank of a service hands out its part of the model below adapters, which both services read."""
    return socket_dir(state_dir) / f"base-{service}-{rank}.sock"


def start_seconds_path(state_dir: Path, service: str) -> Path:
    """Seconds of the parts of a service's last start, as JSON."""
    return socket_dir(state_dir) / f"start-{service}.json"


def replay_path(state_dir: Path) -> Path:
    """How much of its log a restarting trainer has replayed, in words."""
    return socket_dir(state_dir) / "replay"


def log_path(state_dir: Path, service: str) -> Path:
    return state_dir / "logs" / f"{service}.log"


def nccl_log_path(state_dir: Path, rank: int) -> Path:
    """NCCL's log of a trainer rank whose node is in a fleet."""
    return log_path(state_dir, f"nccl{rank}")


def _file(name: str) -> Callable[[Path], Path]:
    return lambda folder: folder / name


# Of a state folder.
journal_path = _file("journal.sqlite")
memory_record_path = _file("memory.jsonl")
"""Memory reported by the services over the node's life."""
training_log_path = _file("training.log")
"""Log of the trainer's commands since its last checkpoint."""
training_save_path = _file("training.save")
"""Record of the checkpoint that this node wrote as its part of a fleet's save."""
training_run_path = _file("training.run")
"""Id of the last run trained on the node, stored with the training log."""
model_texts_path = _file("model.json")
"""Digests of the model's texts at the node's start, by file."""
training_output_path = _file("training.output")
"""Output folder of that run."""
fleet_journal_path = _file("fleet.sqlite")
"""Journal of a fleet, on the node that leads it."""
config_path = _file("node.toml")
"""Configuration of the node that runs, or last ran, in the folder, as its services read it."""
exit_path = _file("exit.json")
"""Why the last node in the folder ended, or is ending."""
stall_dir = _file("stalls")
"""Stacks of hung processes, one file each."""
RUN_CONFIG = "run.toml"
"""Configuration that a run began with, in its output folder."""
archived_config_path = _file("logs/node.toml")
"""Copy of the node's configuration in a run's archive; its folder may contain the user's own."""

LAUNCHED_VARIABLE = "TASUKI_LAUNCHED"
"""Environment variable with the seconds of the machine's monotonic clock at which the supervisor launched the service."""
FIRST_START_VARIABLE = "TASUKI_FIRST_START"
"""Environment variable that the supervisor sets for a service that has not served since the node started."""
REQUESTED_BY = "asked by"
"""Prefix of the reason in `exit_path` if someone stopped the node."""
