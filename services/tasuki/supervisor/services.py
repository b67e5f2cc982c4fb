"""What a node is made of: the command line and the environment of each service."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from tasuki.config.places import config_path, fleet_target, node_targets, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.fleet import EXIT_FLEET_ENDED

EXIT_REFUSED = 2
"""Exit code of a service that was refused something for good, such as a port, or a place in the fleet."""


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """One service of a node, as it is started."""

    name: str
    argv: Sequence[str]
    target: str
    """Empty for one that listens nowhere."""
    health_name: str
    environment: dict[str, str] = field(default_factory=dict)
    after: str | None = None
    """A service that must listen before this one starts."""
    final_codes: tuple[int, ...] = ()
    """Exit codes after which it is not started again, and the node stops."""


def node_services(config: NodeConfig) -> list[ServiceCommand]:
    """The three services, and the fourth of a node that is part of a fleet.

    On CUDA rollout comes up before the trainer: the engine sizes its KV cache by the memory that is free then.
    """
    targets = node_targets(config)
    arguments = ["--config", str(config_path(config.state_dir))]
    # Engines and torch leave sockets and files in the temporary folder when they are killed; the run folder goes with the node.
    shared = {"PYTHONUNBUFFERED": "1", "TMPDIR": str(socket_dir(config.state_dir))}
    is_cpu = config.device == "cpu"
    launch = [sys.executable, "-m", "tasuki.trainer.launch", "--num-ranks", str(config.trainer.num_ranks)]
    preload = ["--preload", "tasuki.trainer.serve"] if is_cpu else []
    return [
        *_fleet_service(config, shared),
        ServiceCommand(
            name="coordinator",
            argv=[sys.executable, "-m", "tasuki.coordinator", *arguments],
            target=targets["coordinator"],
            health_name="tasuki.v1.CoordinatorService",
            environment=shared,
        ),
        ServiceCommand(
            name="rollout",
            argv=[sys.executable, "-m", "tasuki.rollout", *arguments],
            target=targets["rollout"],
            health_name="tasuki.v1.RolloutService",
            environment={**shared, **({"OMP_NUM_THREADS": str(config.rollout.num_threads)} if is_cpu else {})},
        ),
        ServiceCommand(
            name="trainer",
            argv=[*launch, *preload, "--", "-m", "tasuki.trainer", *arguments],
            target=targets["trainer"],
            health_name="tasuki.v1.TrainerService",
            environment={**shared, "OMP_NUM_THREADS": str(config.trainer.num_threads if is_cpu else 1)},
            # A pool holds the start of one, as a GPU does; a base that both read is the engine's to load.
            after="rollout" if config.memory.pool or config.shares_base or not is_cpu else None,
        ),
    ]


def _fleet_service(config: NodeConfig, environment: dict[str, str]) -> list[ServiceCommand]:
    """The node's part in its fleet. Node 0 leads, and serves."""
    if config.fleet is None:
        return []
    return [
        ServiceCommand(
            name="fleet",
            argv=[sys.executable, "-m", "tasuki.fleet", "--config", str(config_path(config.state_dir))],
            target=fleet_target(config) if config.fleet.node_rank == 0 else "",
            health_name="tasuki.v1.CoordinatorService",
            environment=environment,
            final_codes=(EXIT_REFUSED, EXIT_FLEET_ENDED),
        )
    ]


def listens(target: str) -> bool:
    """Whether a server accepts connections at the gRPC target of a unix socket."""
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(target.removeprefix("unix:")) == 0
