"""CoordinatorService: decode, call, encode."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from tasuki.config.lock import Instance
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.journal_file import id_number
from tasuki.coordinator.operations import Operated
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import coordinator_pb2_grpc
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.wire.errors import InvalidArgument, StaleEpoch, StaleSequence
from tasuki.wire.stages import Phase, Service, Stage

_Context = grpc.aio.ServicerContext[Any, Any]
_MAX_REQUEST_ID = 128
_DEFAULT_PAGE_SIZE = 50
_MAX_PAGE_SIZE = 1000


class FleetHold:
    """Attempt and epoch outlive this process in the journal. FleetFence refuses callers beside the fleet."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._sequence = 0
        """Sequence of the fleet's last command to this process; connections to an earlier one are closed."""

    def check(self, command: FleetCommand) -> None:
        """Adopts the command's numbers as the highest.

        Raises StaleEpoch for an earlier life of the fleet, StaleSequence for a command older than the last, and DiskFull.
        """
        self._check(command, least=self._sequence + 1)

    def check_look(self, command: FleetCommand) -> None:
        """Checks a look as `check` does, but accepts the last number again: the channel repeats an interrupted read."""
        self._check(command, least=self._sequence)

    def _check(self, command: FleetCommand, *, least: int) -> None:
        given, known = (command.attempt, command.epoch), self._journal.fleet_epoch(command.name)
        if given < known:
            raise StaleEpoch(
                f"attempt {given[0]} of fleet {command.name!r} in its life {given[1]} is over: this node has seen attempt {known[0]}, "
                f"life {known[1]}",
                epoch=given[0],
                current_epoch=known[0],
            )
        if given > known:
            self._journal.take_fleet_epoch(command.name, attempt=command.attempt, epoch=command.epoch)
        elif command.sequence < least:
            text = f"command {command.sequence} of the fleet comes after {self._sequence}"
            raise StaleSequence(text, sequence=command.sequence, current_sequence=self._sequence)
        self._sequence = command.sequence


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """One node's coordinator on the wire."""

    def __init__(
        self,
        node: Operated,
        journal: Journal,
        plan: Callable[[pb.PlanRequest], Awaitable[pb.PlanResponse]],
        *,
        instance: Instance,
        port_targets: Mapping[str, str],
    ) -> None:
        """node: a node, or a fleet, which clients see as one.

        port_targets: addresses of services by name, for callers at the coordinator's port."""
        self._hold = FleetHold(journal)
        self._port_targets = port_targets
        self._node, self._journal, self._plan, self._instance = node, journal, plan, instance

    async def Acquire(self, request: pb.AcquireRequest, context: _Context) -> AsyncIterator[pb.AcquireResponse]:
        if request.HasField("fleet"):
            self._hold.check(request.fleet)
        phase = Phase.of(request.phase)
        if phase is None:
            raise InvalidArgument("phase", "must be PHASE_TRAIN or PHASE_ROLLOUT")
        async for update in self._node.acquire(phase, _request_id(request.request_id)).follow():
            yield pb.AcquireResponse(event=update.event, state=self._state(update.state, context))

    async def RunStage(self, request: pb.RunStageRequest, context: _Context) -> pb.RunStageResponse:
        if request.HasField("fleet"):
            self._hold.check(request.fleet)
        stage = Stage.of(request.stage)
        if stage is None:
            raise InvalidArgument("stage", f"must be one of {', '.join(f'STAGE_{each}' for each in Stage)}")
        response = pb.RunStageResponse()
        async for update in self._node.run_stage(stage, _request_id(request.request_id)).follow():
            if update.event.stage == request.stage:
                response.event.CopyFrom(update.event)
            response.state.CopyFrom(self._state(update.state, context))
        received = self._journal.last(Stage.SYNC) if stage is Stage.SYNC else None
        if received is not None:
            response.sums.ParseFromString(received.answer)
        return response

    async def GetState(self, request: pb.GetStateRequest, context: _Context) -> pb.GetStateResponse:
        if not request.HasField("fleet"):
            return pb.GetStateResponse(state=self._state(self._node.state(), context))
        self._hold.check_look(request.fleet)
        return pb.GetStateResponse(state=self._state(await self._node.look(), context))

    async def WatchState(self, request: pb.WatchStateRequest, context: _Context) -> AsyncIterator[pb.WatchStateResponse]:
        with self._node.watchers.watching() as queue:
            yield pb.WatchStateResponse(state=self._state(self._node.state(), context))
            while (update := await queue.get()) is not None:
                yield pb.WatchStateResponse(state=self._state(update.state, context), event=update.event)

    async def ListChangeovers(self, request: pb.ListChangeoversRequest, context: _Context) -> pb.ListChangeoversResponse:
        size = request.page_size or _DEFAULT_PAGE_SIZE
        if size > _MAX_PAGE_SIZE:
            raise InvalidArgument("page_size", f"must be at most {_MAX_PAGE_SIZE}, is {size}")
        # No token given out here is longer; a number above SQLite's 64 bits would be our error, not the caller's.
        token = request.page_token
        if token and not (token.isascii() and token.isdigit() and len(token) <= 18):
            raise InvalidArgument("page_token", "is not one that ListChangeovers gave out")
        # One more than asked for tells whether there is another page.
        found = self._journal.changeovers(limit=size + 1, before=int(token) if token else None)
        page = found[:size]
        return pb.ListChangeoversResponse(
            changeovers=page, next_page_token=str(id_number(page[-1].changeover_id)) if len(found) > size else ""
        )

    async def Plan(self, request: pb.PlanRequest, context: _Context) -> pb.PlanResponse:
        return await self._plan(request)

    def _state(self, state: pb.NodeState, context: _Context) -> pb.NodeState:
        """State for one caller: at a port it has the services' ports, "" for a service without one."""
        told = pb.NodeState(instance_id=self._instance.id, lock_path=self._instance.lock_path)
        told.MergeFrom(state)
        if not context.peer().startswith("unix:"):
            told.trainer_target, told.rollout_target = (self._port_targets.get(name, "") for name in Service)
        return told


def _request_id(given: str) -> str:
    if len(given) > _MAX_REQUEST_ID:
        raise InvalidArgument("request_id", f"must have at most {_MAX_REQUEST_ID} characters, has {len(given)}")
    return given or uuid.uuid4().hex
