"""Channels to one node, its last known state and phase, and exactly-once commands."""

import asyncio
import ipaddress
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from tasuki.client.encode import enum_to_proto
from tasuki.client.types import Changeover, NodeState, Phase, StageEvent
from tasuki.v1 import coordinator_pb2, rollout_pb2, trainer_pb2, types_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.address import reachable, split_host_port, unix_target
from tasuki.wire.channel import open_channel
from tasuki.wire.credentials import Credentials
from tasuki.wire.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NodeDown,
    PeerUnavailable,
    StaleEpoch,
    TasukiError,
    WrongPhase,
    from_reason,
    from_rpc_error,
)
from tasuki.wire.flock import is_free
from tasuki.wire.tracing import NO_TRACER, Tracer

if TYPE_CHECKING:
    from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub
    from tasuki.v1.rollout_pb2_grpc import RolloutServiceAsyncStub
    from tasuki.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

READ_TIMEOUT_S = 10.0
_MAX_REPEATS = 2
_PAGE_SIZE = 200
_REPEAT_AFTER_S = 0.2
_LONGEST_PAUSE_S = 2.0
_STALE_TIMEOUT_S = 30.0
_Answer = TypeVar("_Answer")


def resolve_target(target: str | None, state_dir: Path | str | None) -> str:
    """The coordinator's gRPC target. Raises InvalidArgument unless exactly one of the two is given."""
    if (target is None) is (state_dir is None):
        raise InvalidArgument("target", "give either the coordinator's gRPC target or the node's state_dir")
    if not isinstance(target, str | None):  # callers may have no types
        raise InvalidArgument("target", f'is {target!r}; give the coordinator\'s address, such as "127.0.0.1:50050"')
    return target if target is not None else unix_target(Path(state_dir or ""), service="coordinator")


def check_seconds(name: str, seconds: float, *, is_zero_allowed: bool = False) -> None:
    """Raises InvalidArgument naming the argument."""
    is_number = isinstance(seconds, int | float)  # callers may have no types
    if not is_number or not (0 < seconds < math.inf or (is_zero_allowed and seconds == 0)):
        raise InvalidArgument(
            name, f"is {seconds!r}; give a finite number of seconds {'of at least' if is_zero_allowed else 'above'} 0"
        )


class Connection:
    """Channels to one node. Bound to one event loop."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float,
        recovery_timeout_s: float,
        credentials: Credentials | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """timeout_s: of a command. credentials: for TCP ports. tracer: records the calls; closed with the connection.

        recovery_timeout_s: how long to wait for a service that stopped answering, since it may be restarting.
        """
        self._target, self._credentials, self._tracer = target, credentials, tracer
        self._timeout_s, self._recovery_timeout_s = timeout_s, recovery_timeout_s
        self._coordinator_channel = tracer.wrap(open_channel(target, credentials=credentials))
        self.coordinator: CoordinatorServiceAsyncStub = CoordinatorServiceStub(self._coordinator_channel)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.epoch = 0
        self.phase: Phase | None = None
        """The phase that the node is believed to be in. Services that know better refuse the call."""
        self._trainer_target = self._rollout_target = ""
        self._begun: tuple[Phase, asyncio.Task[list[StageEvent]]] | None = None
        """A changeover that no call has waited for."""
        self._instance_id: str | None = None
        self._lock_path = ""

    async def refresh(self) -> NodeState:
        """Asks the coordinator for the node's state and its services' addresses."""

        async def ask() -> coordinator_pb2.GetStateResponse:
            return await self.coordinator.GetState(coordinator_pb2.GetStateRequest(), timeout=READ_TIMEOUT_S)

        try:
            response = await self.read(ask)
        except PeerUnavailable as error:
            cause = error.metadata.get("cause", error.message)
            doubt = ", and does it accept these credentials" if _may_be_refused(self._target, cause) else ""
            text = f"no coordinator answers at {self._target} ({cause}): is the node up{doubt}? `tasuki up CONFIG` starts one"
            raise PeerUnavailable(text, peer=self._target) from None
        except InternalError as error:
            if not error.message.startswith("UNIMPLEMENTED"):
                raise
            text = f"{self._target} is not a coordinator's address, or that of another release: it has no GetState"
            raise InvalidArgument("target", text) from None
        self.take(response.state)
        return response.state

    async def read(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Makes a call that is safe to repeat; waits for a service that is restarting.

        A missed deadline gets one more try: it passes unseen while this process is stopped or its machine is suspended.
        """
        loss, is_late = _Loss(self._recovery_timeout_s if self.epoch else 0.0), False
        while True:
            try:
                return await ask()
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if isinstance(failure, DeadlineExceeded) and not is_late:
                    is_late = True
                elif not await self._outlasts(failure, loss):
                    raise failure from None

    async def changeovers(self, limit: int) -> list[Changeover]:
        """The latest changeovers, newest first."""
        found: list[Changeover] = []
        page_token = ""
        while len(found) < limit:
            request = coordinator_pb2.ListChangeoversRequest(
                page_size=min(limit - len(found), _PAGE_SIZE), page_token=page_token
            )
            page = await self.read(partial(self.coordinator.ListChangeovers, request, timeout=READ_TIMEOUT_S))
            found += page.changeovers
            page_token = page.next_page_token
            if not page_token:
                break
        return found

    def take(self, state: NodeState) -> None:
        """Updates the node's state from a coordinator's message. Raises NodeDown if the message comes from another node."""
        if self._instance_id not in (None, state.instance_id):
            raise NodeDown(
                "the node was stopped and restarted from its initial model, so its training state is lost; load a checkpoint and continue "
                "with a new client",
                instance_id=state.instance_id,
            )
        self._instance_id, self._lock_path = state.instance_id, state.lock_path
        # Without room for its journal the coordinator reports no epoch; the last one reported is still valid.
        self.epoch, self.phase = state.epoch or self.epoch, Phase.of(state.phase)
        self._trainer_target, self._rollout_target = state.trainer_target, state.rollout_target

    async def trainer(self) -> "TrainerServiceAsyncStub":
        if not self._trainer_target:
            await self.refresh()
        return TrainerServiceStub(self._channel("trainer", self._trainer_target))

    async def rollout(self) -> "RolloutServiceAsyncStub":
        if not self._rollout_target:
            await self.refresh()
        return RolloutServiceStub(self._channel("rollout", self._rollout_target))

    async def begin_acquire(self, phase: Phase) -> None:
        """Starts what `acquire` does, unless begun before, and returns at once. Raises InvalidArgument for anything but a phase."""
        enum_to_proto(Phase, phase)
        if self._begun is None or self._begun[0] is not phase:
            await self._end_begun()
            self._begun = phase, asyncio.create_task(self._acquire(phase))

    async def acquire(self, phase: Phase) -> list[StageEvent]:
        """Brings the node to a phase. Returns the events, including those of `begin_acquire`. Raises InvalidArgument as that."""
        enum_to_proto(Phase, phase)
        begun = await self._end_begun()
        return begun[1] if begun is not None and begun[0] is phase else await self._acquire(phase)

    async def hold(self, phase: Phase) -> None:
        """Acquires a phase unless the node is already known to be in it."""
        await self._end_begun()
        if self.phase is None:
            await self.refresh()
        if self.phase is not phase:
            await self._acquire(phase)

    async def train(
        self, give: Callable[[types_pb2.CommandId, float], Awaitable[_Answer]], *, request_id: str | None = None
    ) -> _Answer:
        """Runs a command in phase TRAIN; retries once if another client changed the phase."""
        await self.hold(Phase.TRAIN)
        try:
            return await self.command(give, request_id=request_id)
        except WrongPhase:
            await self.acquire(Phase.TRAIN)
            return await self.command(give, request_id=request_id)

    async def _end_begun(self) -> tuple[Phase, list[StageEvent]] | None:
        """Waits for `begin_acquire`. Returns the phase it asked for and its events; None if nothing was begun."""
        if self._begun is None:
            return None
        (phase, task), self._begun = self._begun, None
        return phase, await task

    async def _acquire(self, phase: Phase) -> list[StageEvent]:
        async def give(command: types_pb2.CommandId, timeout_s: float) -> list[StageEvent]:
            request = coordinator_pb2.AcquireRequest(phase=enum_to_proto(Phase, phase), request_id=command.request_id)
            events: list[StageEvent] = []
            async for response in self.coordinator.Acquire(request, timeout=timeout_s):
                self.take(response.state)
                events.append(response.event)
            return events

        self.phase = None
        events = await self.command(give)
        self.phase = phase
        return events

    async def command(
        self, give: Callable[[types_pb2.CommandId, float], Awaitable[_Answer]], *, request_id: str | None = None
    ) -> _Answer:
        """Sends a mutating command. `give` gets the command's id and its remaining time in seconds.

        Repeats it, with the same request id so that it takes effect once, only if its outcome is unknown or its epoch was stale.
        """
        request_id, timeout_s = request_id or uuid.uuid4().hex, self._timeout_s
        ends = time.monotonic() + timeout_s
        num_repeats, loss = 0, _Loss(self._recovery_timeout_s)
        stale = _Loss(min(self._recovery_timeout_s, _STALE_TIMEOUT_S))
        if not self.epoch:
            await self.refresh()
        while True:
            epoch = self.epoch
            command = types_pb2.CommandId(epoch=epoch, request_id=request_id)
            # The work outlives its deadline: a short retry may still find the answer.
            left_s = max(ends - time.monotonic(), READ_TIMEOUT_S if num_repeats else timeout_s)
            deadline = time.monotonic() + left_s
            try:
                return await give(command, left_s)
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                failure = _failure(error, deadline=deadline)
                if isinstance(failure, DeadlineExceeded) and num_repeats < _MAX_REPEATS:
                    num_repeats += 1
                elif isinstance(failure, DeadlineExceeded) and await self._lacks_service() and await loss.wait():
                    # The restart does not count against the command's deadline.
                    ends, num_repeats = time.monotonic() + timeout_s, 0
                elif isinstance(failure, StaleEpoch):
                    # A service that took the epoch of no coordinator is restarted.
                    if (await self.refresh()).epoch <= epoch and not await stale.wait():
                        raise failure from None
                elif not await self._outlasts(failure, loss):
                    raise failure from None

    async def _lacks_service(self) -> bool:
        """Whether trainer or rollout does not answer because it is restarting. Raises NodeDown if the node is gone."""
        await self._expect_node()
        trainer, rollout = await self.trainer(), await self.rollout()
        asks = (
            lambda: trainer.GetTrainerState(trainer_pb2.GetTrainerStateRequest(), timeout=READ_TIMEOUT_S),
            lambda: rollout.GetRolloutState(rollout_pb2.GetRolloutStateRequest(), timeout=READ_TIMEOUT_S),
        )
        for ask in asks:
            try:
                await ask()
            except grpc.aio.AioRpcError as error:
                if isinstance(from_rpc_error(error), PeerUnavailable | DeadlineExceeded):
                    return True
        return False

    async def _outlasts(self, failure: TasukiError, loss: "_Loss") -> bool:
        """Waits briefly if `failure` comes from a service that may restart; else returns False. Raises NodeDown if the node is gone."""
        # An error that the coordinator reports about a peer is an answer: the coordinator itself is up.
        if not isinstance(failure, PeerUnavailable) or "peer" in failure.metadata:
            return False
        await self._expect_node()
        return await loss.wait()

    async def _expect_node(self) -> None:
        """Raises NodeDown if the node's lock is free or the coordinator belongs to another node."""
        if self._lock_path and is_free(Path(self._lock_path)):
            raise NodeDown(f"the node at {self._target} has ended; see `tasuki state`", lock_path=self._lock_path)
        with suppress(grpc.aio.AioRpcError):
            self.take((await self.coordinator.GetState(coordinator_pb2.GetStateRequest(), timeout=READ_TIMEOUT_S)).state)

    async def close(self) -> None:
        if self._begun is not None:
            self._begun[1].cancel()
            await asyncio.gather(self._begun[1], return_exceptions=True)
        for channel in (self._coordinator_channel, *self._channels.values()):
            await channel.close(grace=None)
        await asyncio.to_thread(self._tracer.close)

    def _channel(self, service: str, target: str) -> grpc.aio.Channel:
        if not target:
            raise PeerUnavailable(f"{service} has no port; set listen in the node's configuration", peer=service)
        if target not in self._channels:
            place = reachable(target, seen_from=self._target)
            self._channels[target] = self._tracer.wrap(open_channel(place, credentials=self._credentials))
        return self._channels[target]


def _failure(error: grpc.aio.AioRpcError | asyncio.CancelledError, *, deadline: float) -> TasukiError:
    """Converts the error that ended a call. Raises CancelledError if the caller cancelled it.

    grpc.aio also cancels a call, without a reason, when it can no longer send its messages.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        return _named_as_argument(from_rpc_error(error))
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    if time.monotonic() >= deadline:
        return DeadlineExceeded("the deadline expired before all messages were sent")
    return PeerUnavailable("the service ended while messages were being sent; see `tasuki state` and its log")


def _named_as_argument(failure: TasukiError) -> TasukiError:
    """The error with the field of a call's header as verbs name it: `loss.denominator` for `header.loss.settings.denominator`."""
    field = failure.metadata.get("field", "")
    if not isinstance(failure, InvalidArgument) or not field.startswith("header."):
        return failure
    name = field.removeprefix("header.").replace(".settings.", ".")
    return from_reason(failure.reason, failure.message.replace(field, name, 1), failure.metadata | {"field": name})


class _Loss:
    """How long a call has been without its service."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._started: float | None = None
        self._pause_s = _REPEAT_AFTER_S

    async def wait(self) -> bool:
        """Waits a moment, longer each time. Returns False once the time is up."""
        now = time.monotonic()
        self._started = now if self._started is None else self._started
        if now - self._started >= self._timeout_s:
            return False
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


def _may_be_refused(target: str, message: str) -> bool:
    """Whether a port may have refused a caller without TLS, or its certificate: it closes the connection.

    A name may have several addresses, such as localhost, of which grpc tells the last one's error.
    """
    if target.startswith("unix:") or "andshake failed" in message:
        return False
    try:
        ipaddress.ip_address(split_host_port(target)[0])
    except ValueError:
        return True
    return "Socket closed" in message
