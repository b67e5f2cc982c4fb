"""One rank of the trainer: joins the others, loads its networks, and carries out commands until the front or the launcher leaves."""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.choices import read_choices
from tasuki.config.environment import cpu_threads
from tasuki.config.gpus import gpus_of
from tasuki.config.paths import model_source, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.models.known import read_model_shape
from tasuki.models.shape import ModelShape
from tasuki.rpc.failpoints import PUBLISHED, Failpoints
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.memory import usage_response
from tasuki.rpc.process_start import StartSeconds, freeze_started
from tasuki.rpc.ranks import CommandRunner, Handlers, RankServer, rank_error
from tasuki.trainer.backends import megatron
from tasuki.trainer.backends.fsdp.backend import FsdpBackend
from tasuki.trainer.data.micro_batch import micro_batch, token_batch
from tasuki.trainer.launch import Launch
from tasuki.trainer.learner import Learner, trained_roles
from tasuki.trainer.memory import round_blocks
from tasuki.trainer.ranks import ranks_path
from tasuki.trainer.replicas import NodeReplicas, join_nodes, mesh_device, start_mesh
from tasuki.trainer.wire import ROLE_MESSAGES, ROLES, decode_loss, decode_parts
from tasuki.v1 import memory_pb2, ranks_pb2, trainer_pb2
from tasuki.v1.ranks_pb2 import RankReady, TrainerRankCommand, TrainerRankResult
from tasuki.v1.trainer_pb2 import RoleState

_log = logging.getLogger("tasuki.trainer")


def run_rank(config: NodeConfig, *, launch: Launch, start: StartSeconds) -> bool:
    """Serves the front until it stops. Returns False if the start failed."""

    def begin() -> tuple[RankReady, Handlers]:
        trainer = config.trainer
        mesh, replicas = _join_groups(config, launch, cleanup)
        nodes_rate = None if replicas is None else replicas.measure_rate()
        nodes_transport = "" if replicas is None else replicas.transport()
        start.end("meeting")
        choices = read_choices(config.state_dir)
        more = {"mesh": mesh, "replicas": replicas, "heartbeat": heartbeat, "ended": start.end}
        if trainer.backend == "megatron":
            megatron.check_installed()
            from tasuki.trainer.backends.megatron.backend import MegatronBackend

            start.end("imports")
            backend = MegatronBackend(config, choices, **more)
        else:
            backend = FsdpBackend(config, choices, **more)
        cleanup.callback(backend.close)
        backend.warm_up()
        start.end("kernels")
        learner = Learner(
            backend,
            optimizers=trained_roles(trainer),
            skips_non_finite=trainer.on_non_finite == "skip",
            progressed=heartbeat.progressed,
        )
        if trainer.spreads_experts and config.device == "cuda":
            round_blocks()
        if launch.rank != 0:
            # From here on the front decides when to stop, after the running call; it also handles signals sent to all ranks.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        heartbeat.beat_in_thread()
        freeze_started()
        commands = RankCommands(learner, failpoints=failpoints)
        shape = read_model_shape(model_source(config))
        return commands.ready(shape, nodes_rate=nodes_rate, nodes_transport=nodes_transport), commands.handlers()

    with ExitStack() as cleanup:
        heartbeat = Heartbeat(config.state_dir, f"trainer{launch.rank}")
        cleanup.callback(heartbeat.close)
        failpoints = Failpoints.of(config, f"trainer{launch.rank}")
        return run_rank_commands(
            begin,
            rank=launch.rank,
            front=ranks_path(socket_dir(config.state_dir), launch.launch_id),
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


class RankCommands:
    """Command handlers, by field of TrainerRankCommand."""

    def __init__(self, learner: Learner, *, failpoints: Failpoints) -> None:
        self._learner, self._backend, self._failpoints = learner, learner.backend, failpoints

    def handlers(self) -> Handlers:
        return {
            "begin_run": self.begin_run,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "discard_gradients": self.discard_gradients,
            "score": self.score,
            "publish_weights": self.publish_weights,
            "withdraw_weights": self.withdraw_weights,
            "save_checkpoint": self.save_checkpoint,
            "load_checkpoint": self.load_checkpoint,
            "export_model": self.export_model,
            "pause": self._backend.memory.pause,
            "resume": self._backend.memory.resume,
            "get_usage": self.get_usage,
        }

    def ready(self, shape: ModelShape, *, nodes_rate: float | None, nodes_transport: str) -> RankReady:
        """nodes_rate: bytes a second to other nodes; nodes_transport: how they get there."""
        return RankReady(
            roles=_roles(self._learner),
            vocab_size=shape.vocab_size,
            context_length=shape.context_length,
            shares_prompts=self._backend.shares_prompts,
            nodes_rate=nodes_rate,
            nodes_transport=nodes_transport,
        )

    def begin_run(self, request: trainer_pb2.BeginRunRequest) -> trainer_pb2.BeginRunResponse:
        self._learner.begin_run(keep_optimizer=request.keep_optimizer)
        return trainer_pb2.BeginRunResponse(policy_version=self._learner.policy_version)

    def forward_backward(self, command: ranks_pb2.RankForwardBackward) -> ranks_pb2.RankLossReport:
        learner, config = self._learner, decode_loss(command.loss)
        batches = [
            micro_batch(
                samples,
                config=config,
                policy_version=learner.policy_version,
                device=self._backend.device,
                part=self._backend.sequence_part,
            )
            for samples in decode_parts(command.micro_batches)
        ]
        role = ROLES[command.role]
        return learner.forward_backward(role, batches, config=config, returns_log_probs=command.returns_log_probs)

    def optim_step(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepResponse:
        started = time.perf_counter()
        answer = self._learner.optim_step(
            ROLES[request.role],
            learning_rate=request.learning_rate if request.HasField("learning_rate") else None,
            schedule_step=request.schedule_step if request.HasField("schedule_step") else None,
            schedule_steps=request.schedule_steps if request.HasField("schedule_steps") else None,
        )
        answer.seconds = time.perf_counter() - started
        return answer

    def discard_gradients(self, request: trainer_pb2.DiscardGradientsRequest) -> trainer_pb2.DiscardGradientsResponse:
        self._learner.discard_gradients(ROLES[request.role])
        return trainer_pb2.DiscardGradientsResponse()

    def score(self, command: ranks_pb2.RankScore) -> ranks_pb2.RankScores:
        device, part = self._backend.device, self._backend.sequence_part
        batches = [token_batch(samples, device=device, part=part) for samples in decode_parts(command.micro_batches)]
        if returns_routes := command.HasField("route_width"):
            batches = [batch.choosing(command.route_width) for batch in batches]
        scores = self._learner.score(ROLES[command.role], batches)
        routes = [batch.routes_TR for batch in batches if returns_routes and batch.routes_TR is not None]
        return ranks_pb2.RankScores(
            micro_batches=[score_N.numpy().tobytes() for score_N in scores],
            routes=[routes_TR.cpu().numpy().tobytes() for routes_TR in routes],
        )

    def publish_weights(self, _: trainer_pb2.PublishWeightsRequest) -> ranks_pb2.RankPublished:
        published = self._learner.publish()
        if self._failpoints.corrupts(PUBLISHED):
            self._backend.publication.damage()
        return published

    def withdraw_weights(self, _: trainer_pb2.WithdrawWeightsRequest) -> trainer_pb2.WithdrawWeightsResponse:
        self._backend.publication.withdraw()
        return trainer_pb2.WithdrawWeightsResponse()

    def save_checkpoint(self, request: trainer_pb2.SaveCheckpointRequest) -> trainer_pb2.SaveCheckpointResponse:
        started = time.perf_counter()
        save_id = request.save_id if request.part == trainer_pb2.SAVE_PART_WRITE else None
        num_bytes = self._learner.save_checkpoint(Path(request.path), save_id=save_id)
        return trainer_pb2.SaveCheckpointResponse(
            policy_version=self._learner.policy_version, bytes=num_bytes, seconds=time.perf_counter() - started
        )

    def load_checkpoint(self, request: trainer_pb2.LoadCheckpointRequest) -> trainer_pb2.LoadCheckpointResponse:
        if request.validate_only:
            return trainer_pb2.LoadCheckpointResponse(policy_version=self._learner.check_checkpoint(Path(request.path)))
        as_version = request.as_version if request.HasField("as_version") else None
        self._learner.load_checkpoint(Path(request.path), as_version=as_version)
        roles = _roles(self._learner)
        return trainer_pb2.LoadCheckpointResponse(policy_version=self._learner.policy_version, roles=roles)

    def export_model(self, request: trainer_pb2.ExportModelRequest) -> trainer_pb2.ExportModelResponse:
        started = time.perf_counter()
        num_bytes = self._backend.export_model(Path(request.path))
        return trainer_pb2.ExportModelResponse(
            policy_version=self._learner.policy_version, bytes=num_bytes, seconds=time.perf_counter() - started
        )

    def get_usage(self, request: memory_pb2.GetUsageRequest) -> memory_pb2.GetUsageResponse:
        memory = self._backend.memory
        return usage_response(memory.usage(), memory.device_usage(skip_torch_cache=request.skip_torch_cache))


def _roles(learner: Learner) -> list[RoleState]:
    return [
        RoleState(
            role=ROLE_MESSAGES[role],
            version=state.version,
            schedule_start=state.schedule_start,
            has_gradients=state.has_gradients,
            num_parameters=learner.backend.num_parameters(role),
        )
        for role, state in learner.roles.items()
    ]


def run_rank_commands(
    start: Callable[[], tuple[RankReady, Handlers]],
    *,
    rank: int,
    front: Path,
    launcher_fd: int,
    heartbeat: Heartbeat,
    failpoints: Failpoints,
) -> bool:
    """Starts the rank's work, then answers the front until it stops, or is gone. False when the start failed; the front knows why.

    front: its socket. launcher_fd: pidfd of the process that launched the ranks; its end ends the rank. heartbeat: shows when a command
    runs.
    """
    with closing(RankServer(f"ipc://{front}", rank=rank)) as server:
        front_gone = server.front_gone()
        try:
            ready, handlers = start()
        except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, the front has to hear of it
            server.send(TrainerRankResult(rank=rank, error=rank_error(error)))
            return False
        ready.pid = os.getpid()
        server.send(TrainerRankResult(rank=rank, ready=ready))
        runner = CommandRunner(TrainerRankResult, handlers, rank=rank, failpoints=failpoints, heartbeat=heartbeat)
        for command in server.commands(TrainerRankCommand, until=[front_gone, launcher_fd]):
            server.send(runner.run(command))
        if server.ended_by is not None:
            cause = "front_gone" if server.ended_by is front_gone else "launcher_gone"
            _log.warning("event=rank_leaves rank=%d cause=%s", rank, cause)
        return True
