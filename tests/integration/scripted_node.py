"""A node for tests of the client: real servers on unix sockets with the real command gate, and scripted work."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tasuki.rpc.commands import CommandGate, chunks
from tasuki.rpc.server import RpcServer
from tasuki.v1 import coordinator_pb2 as coordinator
from tasuki.v1 import coordinator_pb2_grpc, rollout_pb2_grpc, trainer_pb2_grpc, types_pb2
from tasuki.v1 import rollout_pb2 as rollout
from tasuki.v1 import trainer_pb2 as trainer
from tasuki.wire.address import socket_folder, unix_target
from tasuki.wire.channel import MAX_CHUNK_BYTES
from tasuki.wire.errors import Asleep, InvalidArgument, NoGradients, TasukiError, WrongPhase
from tasuki.wire.routes import in_parts

# Some RPCs are left out on purpose: the client has no verb for them.
ADDERS: dict[str, Callable] = {
    "coordinator": coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server,
    "trainer": trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
    "rollout": rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
}


class ScriptedNode(
    coordinator_pb2_grpc.CoordinatorServiceServicer,
    trainer_pb2_grpc.TrainerServiceServicer,
    rollout_pb2_grpc.RolloutServiceServicer,
):
    """A node whose trainer and rollout obey the phase. `failures` are raised one per call, after the work is done, as if the answer was
    lost."""

    def __init__(self, state_dir: Path) -> None:
        self.gate = CommandGate()
        self.epoch = 1
        self.phase = types_pb2.PHASE_TRAIN
        self.num_changeovers = 0
        self.instance_id, self.lock_path = "", ""
        self.policy_version = 0
        self.num_forward_backward = 0
        self.pending: set[int] = set()
        """Roles with accumulated gradients."""
        self.begun: list[bool] = []
        """For each run, whether it kept the optimizer's state."""
        self.failures: list[TasukiError] = []
        self.refusals: list[TasukiError] = []
        self.requests: list[rollout.GenerateRequest] = []
        self.samples: list[types_pb2.TrainingSample] = []
        self.chunk_bytes: list[int] = []
        self.hang = asyncio.Event()
        self.hang.set()
        self.changeover = asyncio.Event()
        """Set while a changeover is allowed to end."""
        self.changeover.set()
        self.left_early = asyncio.Event()
        self.changed = asyncio.Condition()
        self.targets = {name: unix_target(state_dir, service=name) for name in ADDERS}
        self.servers: list[RpcServer] = []

    async def serve(self, name: str) -> None:
        server = RpcServer(service=name, target=self.targets[name])
        server.add(ADDERS[name], self, f"tasuki.v1.{name.capitalize()}Service")
        await server.start()
        self.servers.append(server)

    def node_state(self) -> coordinator.NodeState:
        return coordinator.NodeState(
            phase=self.phase,
            epoch=self.epoch,
            trainer_target=self.targets["trainer"],
            rollout_target=self.targets["rollout"],
            num_changeovers=self.num_changeovers,
            boot_id="boot",
            instance_id=self.instance_id,
            lock_path=self.lock_path,
            stage=types_pb2.STAGE_LOAD_TRAINER if self.phase == types_pb2.PHASE_TRAIN else types_pb2.STAGE_RESUME_KV,
        )

    def _answered(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def _refused(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)

    def _need_train(self) -> None:
        if self.phase != types_pb2.PHASE_TRAIN:
            raise WrongPhase("needs phase TRAIN", needed="TRAIN")

    # Coordinator.

    async def GetState(self, request, context):
        return coordinator.GetStateResponse(state=self.node_state())

    async def Acquire(self, request, context):
        self._refused()
        await self.changeover.wait()
        event = coordinator.StageEvent(status=coordinator.STAGE_STATUS_HELD)
        if request.phase != self.phase:
            self.phase, self.num_changeovers = request.phase, self.num_changeovers + 1
            status = coordinator.STAGE_STATUS_DONE
            event = coordinator.StageEvent(changeover_id="c1", stage=types_pb2.STAGE_SYNC, status=status, seconds=0.25, bytes=7)
        async with self.changed:
            self.changed.notify_all()
        yield coordinator.AcquireResponse(event=event, state=self.node_state())

    async def WatchState(self, request, context):
        yield coordinator.WatchStateResponse(state=self.node_state())
        while True:
            async with self.changed:
                await self.changed.wait()
            event = coordinator.StageEvent(stage=types_pb2.STAGE_RESUME_KV, status=coordinator.STAGE_STATUS_DONE)
            yield coordinator.WatchStateResponse(state=self.node_state(), event=event)

    async def ListChangeovers(self, request, context):
        """Lists 250 changeovers, in pages."""
        start = int(request.page_token or 250)
        stop = max(0, start - request.page_size)
        made = [
            coordinator.Changeover(
                changeover_id=f"c{number}",
                target=types_pb2.PHASE_ROLLOUT,
                status=coordinator.STAGE_STATUS_DONE,
                policy_version=number,
            )
            for number in range(start, stop, -1)
        ]
        return coordinator.ListChangeoversResponse(changeovers=made, next_page_token=str(stop) if stop else "")

    # Trainer.

    async def ForwardBackward(self, request_iterator, context):
        header, samples = None, []
        async for message in request_iterator:
            self.chunk_bytes.append(message.ByteSize())
            if message.WhichOneof("part") == "header":
                header = message.header
            else:
                samples += message.samples.samples

        async def work():
            self._need_train()
            self._refused()
            self.samples += samples
            self.num_forward_backward += 1
            self.pending.add(header.role)
            return trainer.ForwardBackwardResponse(loss=header.loss.settings["clip_high"], num_samples=len(samples))

        response = await self.gate.once(header, work)
        self._answered()
        await self.hang.wait()
        return response

    async def OptimStep(self, request, context):
        async def work():
            self._need_train()
            if request.role not in self.pending:
                raise NoGradients("call ForwardBackward first")
            self.pending.remove(request.role)
            self.policy_version += request.role == types_pb2.ROLE_POLICY
            return trainer.OptimStepResponse(version=self.policy_version, learning_rate=request.learning_rate)

        response = await self.gate.once(request, work)
        self._answered()
        await self.hang.wait()
        return response

    async def ComputeLogProbs(self, request_iterator, context):
        """Of the old policy with more experts than a message holds, each with the number of the first completion token."""
        self._need_train()
        num_routed = 0
        async for message in request_iterator:
            num_routed += MAX_CHUNK_BYTES * message.header.is_old_policy
            scored = [
                trainer.TokenLogProbs(
                    log_probs=[-float(token_id) for token_id in sample.completion_token_ids],
                    routed_experts=bytes([sample.completion_token_ids[0] % 256]) * num_routed,
                )
                for sample in message.samples.samples
            ]
            for chunk in chunks(list(in_parts(scored))):
                yield trainer.ComputeLogProbsResponse(samples=chunk)

    async def ComputeValues(self, request_iterator, context):
        self._need_train()
        async for message in request_iterator:
            valued = [
                trainer.TokenValues(values=[float(token_id) for token_id in sample.completion_token_ids])
                for sample in message.samples.samples
            ]
            yield trainer.ComputeValuesResponse(samples=valued)

    async def BeginRun(self, request, context):
        async def work():
            self._need_train()
            self.begun.append(request.keep_optimizer)
            return trainer.BeginRunResponse(policy_version=self.policy_version)

        return await self.gate.once(request, work)

    async def SaveCheckpoint(self, request, context):
        return trainer.SaveCheckpointResponse(policy_version=self.policy_version, bytes=len(request.path))

    async def LoadCheckpoint(self, request, context):
        self._refused()
        self.policy_version = int(request.path.rpartition("-")[2])
        return trainer.LoadCheckpointResponse(policy_version=self.policy_version)

    async def DiscardGradients(self, request, context):
        self.num_forward_backward = 0
        self.pending.discard(request.role)
        return trainer.DiscardGradientsResponse()

    async def GetTrainerState(self, request, context):
        roles = (types_pb2.ROLE_POLICY, types_pb2.ROLE_CRITIC)
        return trainer.GetTrainerStateResponse(
            policy_version=self.policy_version,
            has_gradients=bool(self.pending),
            roles=[
                trainer.RoleState(role=role, version=self.policy_version, has_gradients=role in self.pending) for role in roles
            ],
        )

    # Rollout.

    async def GetRolloutState(self, request, context):
        return rollout.GetRolloutStateResponse()

    async def Generate(self, request, context):
        self.requests.append(request)
        if self.phase != types_pb2.PHASE_ROLLOUT:
            raise Asleep("rollout sleeps; acquire phase ROLLOUT")
        for prompt_index, prompt in enumerate(request.prompts):
            if not prompt.token_ids:
                raise InvalidArgument(f"prompts[{prompt_index}]", "empty")
        try:
            for prompt_index in reversed(range(len(request.prompts))):
                for sample_index in reversed(range(request.num_samples)):
                    token_ids = [request.prompts[prompt_index].token_ids[0], sample_index]
                    sample = types_pb2.Sample(
                        prompt_index=prompt_index,
                        sample_index=sample_index,
                        token_ids=token_ids,
                        rollout_log_probs=[-0.5, -0.25],
                        finish_reason=types_pb2.FINISH_REASON_STOP,
                        policy_version=3,
                        temperature=0.5,
                        has_exact_log_probs=True,
                    )
                    yield rollout.GenerateResponse(samples=[sample])
                    self._answered()
                    await self.hang.wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.left_early.set()
            raise


@asynccontextmanager
async def scripted_node(
    state_dir: Path, *, make: Callable[[Path], ScriptedNode] = ScriptedNode, services: Sequence[str] = tuple(ADDERS)
) -> AsyncIterator[ScriptedNode]:
    """services: those that serve from the start."""
    # One of a killed test may be there: the path depends on `state_dir` alone.
    shutil.rmtree(socket_folder(state_dir), ignore_errors=True)
    socket_folder(state_dir).mkdir(mode=0o700, parents=True)
    node = make(state_dir)
    for name in services:
        await node.serve(name)
    try:
        yield node
    finally:
        node.hang.set()
        for server in node.servers:
            await server.stop(grace_s=0)
        shutil.rmtree(socket_folder(state_dir), ignore_errors=True)
