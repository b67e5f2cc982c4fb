"""One rank of the trainer: joins the others, loads its networks, and carries out commands."""

import signal
from contextlib import ExitStack

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.choices import read_choices
from tasuki.config.environment import cpu_threads
from tasuki.config.gpus import gpus_of
from tasuki.config.paths import socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.rpc.failpoints import Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.process_start import StartSeconds, freeze_started
from tasuki.rpc.ranks import Handlers
from tasuki.trainer.backends.fsdp.backend import FsdpBackend
from tasuki.trainer.launch import Launch
from tasuki.trainer.learner import Learner, trained_roles
from tasuki.trainer.ranks.commands import RankCommands
from tasuki.trainer.ranks.commands import run_rank as run_commands
from tasuki.trainer.replicas import NodeReplicas, join_nodes, mesh_device, start_mesh
from tasuki.v1.ranks_pb2 import RankReady


def run_rank(config: NodeConfig, *, launch: Launch, start: StartSeconds) -> bool:
    """Serves the front until it stops. Returns False if the start failed."""

    def begin() -> tuple[RankReady, Handlers]:
        trainer = config.trainer
        mesh, replicas = _join_groups(config, launch, cleanup)
        nodes_rate = None if replicas is None else replicas.measure_rate()
        nodes_transport = "" if replicas is None else replicas.transport()
        start.end("meeting")
        backend = FsdpBackend(
            config, read_choices(config.state_dir), mesh=mesh, replicas=replicas, heartbeat=heartbeat, ended=start.end
        )
        cleanup.callback(backend.close)
        backend.warm_up()
        start.end("kernels")
        learner = Learner(
            backend,
            optimizers=trained_roles(trainer),
            skips_non_finite=trainer.on_non_finite == "skip",
            progressed=heartbeat.progressed,
        )
        if launch.rank != 0:
            # From here on the front decides when to stop, after the running call; it also handles signals sent to all ranks.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        heartbeat.beat_in_thread()
        freeze_started()
        commands = RankCommands(learner, failpoints=failpoints)
        return commands.ready(nodes_rate=nodes_rate, nodes_transport=nodes_transport), commands.handlers()

    with ExitStack() as cleanup:
        heartbeat = Heartbeat(config.state_dir, f"trainer{launch.rank}")
        cleanup.callback(heartbeat.close)
        failpoints = Failpoints.of(config, f"trainer{launch.rank}")
        return run_commands(
            begin,
            rank=launch.rank,
            socket_dir=socket_dir(config.state_dir),
            launcher_fd=launch.launcher_fd,
            heartbeat=heartbeat,
            failpoints=failpoints,
        )


def _join_groups(config: NodeConfig, launch: Launch, cleanup: ExitStack) -> tuple[DeviceMesh, NodeReplicas | None]:
    """Joins the node's other ranks and, in a fleet, this rank's counterparts on other nodes. `cleanup` leaves both groups.

    Raises the errors of start_mesh and join_nodes.
    """
    mesh = start_mesh(
        config.device,
        launch=launch,
        gpu=gpus_of(config).trainer[launch.local_rank],
        num_threads=cpu_threads(),
        timeout_s=config.coordinator.stage_timeout_s,
    )
    cleanup.callback(dist.destroy_process_group)
    replicas = join_nodes(config, launch, device=mesh_device(mesh))
    if replicas is not None:
        cleanup.callback(replicas.close)
    return mesh, replicas
