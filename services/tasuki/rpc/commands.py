"""Fencing, order and exactly-once answers of mutating commands: one gate per service."""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from tasuki.rpc.failpoints import NO_FAILPOINTS, Failpoints
from tasuki.v1.memory_pb2 import PauseRequest, ResumeRequest
from tasuki.v1.rollout_pb2 import ReceiveWeightsResponse
from tasuki.v1.trainer_pb2 import PublishWeightsResponse
from tasuki.v1.types_pb2 import CommandId
from tasuki.wire.channel import MAX_CHUNK_BYTES
from tasuki.wire.errors import DiskFull, InvalidArgument, PathExists, StaleEpoch, StaleSequence, TasukiError, WrongPhase
from tasuki.wire.stages import RING, Rpc, Stage
from tasuki.wire.tracing import REQUEST_ID, annotate

_Answer = TypeVar("_Answer")
_log = logging.getLogger("tasuki.rpc")
_KEPT_ANSWERS = 1024
_MAX_REQUEST_ID = 128
_MAX_STEP = 10**6
"""Numbers between two stage commands of an epoch at one service: the other one may be asked again and again meanwhile."""
_MAX_FIRST = 10**8
"""The first number of an epoch at a service, which may be restarted late in it. An epoch of so many stages lasts for weeks."""
_STAGES: dict[str, Stage] = {rule.rpc: rule.stage for rule in RING if rule.rpc not in (Rpc.PAUSE, Rpc.RESUME)}
PASSING: tuple[type[TasukiError], ...] = (DiskFull, PathExists, WrongPhase)
"""Errors after which nothing has changed, and which may pass: a repeated command, unless it is a stage, runs again."""
REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
"""Codes of the errors after which nothing has changed."""


class Commanded(Protocol):
    """Request, or its header, that carries a CommandId."""

    @property
    def command(self) -> CommandId: ...


class CommandGate:
    """Runs commands one at a time, each once: a repeated request gets the first answer or error.

    Only a command that is no stage and ended in a `passing` error, such as a full disk, runs again. A request repeats another if
    request_id, message type and content agree; the same request_id with other content is refused. A command outlives its caller:
    after a cancelled or timed-out call it keeps running, and the same request_id finds it.
    """

    def __init__(
        self, failpoints: Failpoints = NO_FAILPOINTS, *, boot_id: str = "", passing: tuple[type[TasukiError], ...] = PASSING
    ) -> None:
        """failpoints: each command hits one named after its stage or itself before it runs, and one with ".done" after.

        boot_id: of this life of the service, for the log.
        """
        self._failpoints, self._boot_id, self._passing = failpoints, boot_id, passing
        self.epoch = 0
        self.sequence = 0
        self._looked = 0
        """Epoch of the coordinator that read the state last."""
        self._announced: set[int] = set()
        """Epochs of all coordinators that did."""
        self._refused = (0, 0)
        """Epoch and sequence of the stage command that was refused last."""
        self._answers: OrderedDict[str, tuple[bytes, asyncio.Future[Any]]] = OrderedDict()
        self._stages: set[asyncio.Future[Any]] = set()
        """Pending answers of stage commands."""
        self._lock = asyncio.Lock()

    @property
    def is_in_stage(self) -> bool:
        """Whether a stage command runs or waits for its turn."""
        return bool(self._stages)

    def look(self, epoch: int) -> None:
        """Records that a coordinator read the state, which fences later stage commands of older coordinators.

        The latest look counts, not the highest: a bogus epoch locks the coordinator out only until its next look.
        Epoch 0 is a read by any other caller.
        """
        if epoch:
            self._looked = epoch
            self._announced = {known for known in self._announced if known >= self.epoch} | {epoch}

    async def stage(self, request: Commanded, action: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Runs a stage command of the coordinator.

        Raises StaleEpoch for an epoch below the highest executed or the last look, or one that never looked.
        Raises StaleSequence if the sequence number does not grow.
        Raises InvalidArgument if it is further ahead than a coordinator can be, or without a request_id.

        A refused command leaves epoch and sequence unchanged, so a misplaced one cannot lock the coordinator out. Within its epoch its
        number stays used: a refused undo proves that the stage never ran, so a late command for that stage must not run either.
        """
        content = digest(request)
        answer = self._first_answer(request, content)
        if answer is None:
            before = (self.epoch, self.sequence)
            self._fence(request.command)
            answer = asyncio.create_task(self._run_in_turn(request, action, before))
            self._keep(request.command.request_id, content, answer)
            self._stages.add(answer)
            answer.add_done_callback(self._stages.discard)
        return cast(_Answer, await asyncio.shield(answer))

    async def once(
        self, request: Commanded, action: Callable[[], Awaitable[_Answer]], *, content: bytes | None = None
    ) -> _Answer:
        """Runs a command that is no stage. Epoch 0 means that the caller does not ask for fencing.

        content: digest of the whole command, where `request` is the header of a stream.
        """
        content = digest(request) if content is None else content
        answer = self._first_answer(request, content)
        is_over = answer is not None and answer.done() and not answer.cancelled()
        if answer is None or (is_over and isinstance(answer.exception(), self._passing)):
            if request.command.epoch:
                _refuse_old(request.command.epoch, current=self.epoch)
            answer = asyncio.create_task(self._run_in_turn(request, action))
            self._keep(request.command.request_id, content, answer)
        return cast(_Answer, await asyncio.shield(answer))

    def has_begun(self, request: Commanded) -> bool:
        """Whether a command with this request_id was begun, whatever its outcome."""
        return request.command.request_id in self._answers

    def restore(self, request_id: str, *, content: bytes, answer: Message | TasukiError) -> None:
        """Registers `answer` for repeats of a command that an earlier life of the service executed. content: its `digest`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(answer, TasukiError):
            future.set_exception(answer)
            future.exception()  # read here, so asyncio does not report it as lost
        else:
            future.set_result(answer)
        self._keep(request_id, content, future)

    def _first_answer(self, request: Commanded, content: bytes) -> asyncio.Future[Any] | None:
        """Answer of this same request; None if it is new. content: its digest."""
        request_id = request.command.request_id
        annotate(REQUEST_ID, request_id)
        if not 0 < len(request_id) <= _MAX_REQUEST_ID:
            raise InvalidArgument(
                "command.request_id", f"give one of 1 to {_MAX_REQUEST_ID} characters, unique for each intent"
            )
        first_content, answer = self._answers.get(request_id, (b"", None))
        if answer is not None and content != first_content:
            raise InvalidArgument("command.request_id", f"{request_id} was used for another request; choose a new one")
        return answer

    def _fence(self, command: CommandId) -> None:
        """Adopts the epoch and sequence of a stage command. Raises as `stage`."""
        current = max(self.epoch, self._looked)
        _refuse_old(command.epoch, current=current)
        if command.epoch not in self._announced:
            raise StaleEpoch(
                f"no coordinator of epoch {command.epoch} has read this service's state; ask the coordinator for the stage",
                epoch=command.epoch,
                current_epoch=current,
            )
        seen = ((self.epoch, self.sequence), self._refused, (command.epoch, 0))
        # 0 if the other service, or an earlier life of this one, received the epoch's earlier numbers.
        taken, sequence = max(number for epoch, number in seen if epoch == command.epoch), command.sequence
        if sequence <= taken:
            raise StaleSequence(f"stage command {sequence} comes after {taken}", sequence=sequence, current_sequence=taken)
        if sequence - taken > (_MAX_STEP if taken else _MAX_FIRST):
            text = f"{sequence} is further from {taken} than any coordinator comes; ask the coordinator for the stage"
            raise InvalidArgument("command.sequence", text, current_sequence=taken)
        self.epoch, self.sequence = command.epoch, command.sequence

    def _keep(self, request_id: str, content: bytes, answer: asyncio.Future[Any]) -> None:
        self._answers[request_id] = content, answer
        for old in list(islice(self._answers, max(0, len(self._answers) - _KEPT_ANSWERS))):
            if self._answers[old][1].done():
                # There may be no waiter left; reading the error keeps asyncio from reporting it as lost.
                self._answers.pop(old)[1].exception()

    async def _run_in_turn(
        self, request: Commanded, action: Callable[[], Awaitable[_Answer]], before: tuple[int, int] | None = None
    ) -> _Answer:
        """Runs a command after those before it. before: epoch and sequence to restore if a stage command is refused."""
        name, command = _name(request), request.command
        async with self._lock:
            outcome, version, started = "INTERNAL", "-", time.perf_counter()
            try:
                self._failpoints.hit(name)
                answer = await action()
                self._failpoints.hit(f"{name}.done")
                outcome, version = "OK", _version(answer)
                return answer
            except TasukiError as error:
                outcome = error.reason
                sent = (command.epoch, command.sequence)
                if before is not None and error.code in REFUSALS and sent == (self.epoch, self.sequence):
                    (self.epoch, self.sequence), self._refused = before, sent
                raise
            finally:
                # `tasuki audit` reads it (coordinator/command_log.py). A request id may be any text.
                text = "event=command name=%s epoch=%d sequence=%d outcome=%s seconds=%.4f boot_id=%s version=%s request_id=%a"
                numbers, seconds = (command.epoch, command.sequence), time.perf_counter() - started
                _log.info(text, name, *numbers, outcome, seconds, self._boot_id, version, command.request_id)


def _refuse_old(epoch: int, *, current: int) -> None:
    if epoch < current:
        raise StaleEpoch(
            f"epoch {epoch} is over: this service has seen {current}; read the coordinator's state again",
            epoch=epoch,
            current_epoch=current,
        )


def _name(request: Commanded) -> str:
    """Name of the command's stage, e.g. "SYNC", or of the command itself, e.g. "OptimStep"."""
    if isinstance(request, PauseRequest | ResumeRequest) and (stage := Stage.of(request.stage)) is not None:
        return stage
    name = type(request).__name__.removesuffix("Request").removesuffix("Header")
    return _STAGES.get(name, name)


def _version(answer: object) -> str:
    """Version that was published or received, for the log."""
    if isinstance(answer, PublishWeightsResponse):
        return str(answer.weights.policy_version)
    return str(answer.policy_version) if isinstance(answer, ReceiveWeightsResponse) else "-"


def digest(request: Commanded, stream: Iterable[Message] = ()) -> bytes:
    """Digest of message type and content, without the CommandId, whose epoch may differ between tries.

    stream: what follows `request` where it is a header.
    """
    body = type(request)()
    cast(Message, body).CopyFrom(cast(Message, request))
    cast(Message, body).ClearField("command")
    content = cast(Message, body).SerializeToString(deterministic=True)
    found = hashlib.sha256(type(request).__name__.encode() + b"\0" + content)
    for message in stream:
        content = message.SerializeToString(deterministic=True)
        found.update(len(content).to_bytes(8, "little") + content)
    return found.digest()


_Part = TypeVar("_Part", bound=Message)


def chunks(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yields runs of parts that fit a message; nothing for no parts. A single part always fits, as it did in its request."""
    chunk: list[_Part] = []
    chunk_bytes = 0
    for part in parts:
        part_bytes = part.ByteSize()
        if chunk and chunk_bytes + part_bytes > MAX_CHUNK_BYTES:
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(part)
        chunk_bytes += part_bytes
    if chunk:
        yield chunk


_NO_DEADLINE_S = 600.0
"""Deadline of a read whose caller sets none; a mutating call without one is refused."""


def remaining_s(context: grpc.aio.ServicerContext) -> float:
    """Seconds until the call's deadline."""
    remaining = context.time_remaining()
    return _NO_DEADLINE_S if remaining is None else remaining
