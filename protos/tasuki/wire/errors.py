"""Errors that cross the wire as a gRPC status with ErrorInfo(reason, domain, metadata), by one table for both directions.

Raise a subclass of TasukiError anywhere: rpc/ converts it to a status, and the client converts it back to the same class.
"""

import errno
import re
from typing import ClassVar, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "tasuki"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""System errors for a write without space left."""
RETRY_AFTER_S = 1.0
_MAX_MESSAGE_BYTES, _MAX_METADATA_BYTES = 1_000, 1_500
"""Limits of a message, and of all metadata values together. gRPC sends a message thrice, encoded; clients refuse more than 8 KiB."""


class TasukiError(Exception):
    """Base of all errors meant for the caller. `metadata` holds their numbers as strings."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = {key: str(value) for key, value in metadata.items()}


class InternalError(TasukiError):
    """A bug in tasuki. The service's log has the traceback under the request id."""


class InvalidArgument(TasukiError):
    """A field of the request is invalid. `field` names it."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str, **metadata: object) -> None:
        is_named = re.match(rf"{re.escape(field)}(?!\w)", problem) is not None
        super().__init__(problem if is_named else f"{field}: {problem}", **{"field": field, **metadata})


class Unauthenticated(TasukiError):
    """A call at a port without a token or certificate that the node accepts."""

    code, reason = grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"


class PermissionDenied(TasukiError):
    """A call that the caller's role does not permit. metadata: `needed` role and `role`, or `path` and the `key` that sets the folders."""

    code, reason = grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"


class BadHandle(TasukiError):
    """A memory handle or manifest that is unsafe to map: bounds, overlap, dtype, names, digest."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "BAD_HANDLE"


class StageOrder(TasukiError):
    """A stage out of order. metadata: `stage` requested, `after` (last completed, `START` before any), `allowed` next."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "STAGE_ORDER"


class WrongPhase(TasukiError):
    """A call that needs the other phase. metadata: `needed`."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "WRONG_PHASE"


class Busy(TasukiError):
    """Refused because other work is running. metadata: `num_running`."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "BUSY"


class ChangeoverRunning(TasukiError):
    """A changeover to the other phase is running. metadata: `changeover_id`."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "CHANGEOVER_RUNNING"


class Interrupted(TasukiError):
    """A changeover that did not finish. metadata: `changeover_id`."""

    code, reason = grpc.StatusCode.ABORTED, "INTERRUPTED"


class NoGradients(TasukiError):
    """OptimStep without a preceding ForwardBackward."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "NO_GRADIENTS"


class GradientsPending(TasukiError):
    """Publishing, loading or BeginRun would lose accumulated gradients. Call OptimStep or DiscardGradients first."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "GRADIENTS_PENDING"


class VersionOrder(TasukiError):
    """A policy version that does not increase or is not the requested one. metadata: `have`, `want`."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "VERSION_ORDER"


class EnginePoisoned(TasukiError):
    """The engine's memory can no longer be trusted. It must be restarted."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_POISONED"


class StaleEpoch(TasukiError):
    """A command from an older coordinator. metadata: `epoch`, `current_epoch`."""

    code, reason = grpc.StatusCode.ABORTED, "STALE_EPOCH"


class StaleSequence(TasukiError):
    """A stage command that is not newer than the last accepted one. metadata: `sequence`, `current_sequence`."""

    code, reason = grpc.StatusCode.ABORTED, "STALE_SEQUENCE"


class WeightsCorrupt(TasukiError):
    """Received weights differ from the published ones. metadata: `tensors` (first five); on a CPU also the engine's `rank`."""

    code, reason = grpc.StatusCode.DATA_LOSS, "WEIGHTS_CORRUPT"


class PolicyDiverged(TasukiError):
    """The policy's log-probabilities are not finite, so its weights are unusable. Load a checkpoint. metadata: `policy_version`."""

    code, reason = grpc.StatusCode.DATA_LOSS, "POLICY_DIVERGED"


class GradientsNotFinite(TasukiError):
    """A gradient is NaN or infinite; the step was not taken."""

    code, reason = grpc.StatusCode.DATA_LOSS, "GRADIENTS_NOT_FINITE"


class OutOfGpuMemory(TasukiError):
    """Not enough GPU memory. metadata: `tag`, `needed_bytes`, `free_bytes`, `device`."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "GPU_MEMORY"


class MessageTooLarge(TasukiError):
    """A message exceeds the channel's limit. Send less at once."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"


class Asleep(TasukiError):
    """Rollout is asleep and does not serve. Acquire phase ROLLOUT."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "ASLEEP"


class Draining(TasukiError):
    """Rollout is draining and accepts no new requests."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "DRAINING"


class PeerUnavailable(TasukiError):
    """A required service does not answer. metadata: `peer`."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "PEER_UNAVAILABLE"


class SamplesLost(PeerUnavailable):
    """Nodes of a fleet were lost while generating; all other samples arrived. metadata: `nodes`, and `prompts` with missing samples,
    such as "0-3,8"."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "SAMPLES_LOST"


class NotJoined(PeerUnavailable):
    """A node of the fleet has not joined yet, or must join again. metadata: `node_rank`."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "NOT_JOINED"


class PathExists(TasukiError):
    """The path to write already exists."""

    code, reason = grpc.StatusCode.ALREADY_EXISTS, "PATH_EXISTS"


class DiskFull(TasukiError):
    """A file cannot be written, usually for lack of space. The request was not carried out. metadata: `path`."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "DISK_FULL"


class PathNotFound(TasukiError):
    """A path does not exist, or is not what the call needs. metadata: `path`."""

    code, reason = grpc.StatusCode.NOT_FOUND, "PATH_NOT_FOUND"


class PathPermissionDenied(TasukiError):
    """The process's user has no permission to read or write a path. metadata: `path`, `user`."""

    code, reason = grpc.StatusCode.PERMISSION_DENIED, "PATH_PERMISSION_DENIED"


class UnsupportedModel(TasukiError):
    """The service does not support the model's architecture. metadata: `architecture`."""

    code, reason = grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_MODEL"


class NotInstalled(TasukiError):
    """A package that the command needs is not installed. metadata: `packages`, and `extras` of tasuki that install them."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "NOT_INSTALLED"


class DeadlineRequired(TasukiError):
    """A mutating call without a deadline."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "DEADLINE_REQUIRED"


class DeadlineExceeded(TasukiError):
    """The call or stage did not finish in time. metadata: `stage` or `rpc`."""

    code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


class NodeRunning(TasukiError):
    """Another node, coordinator or `tasuki train` already uses this folder, socket or port. metadata: `state_dir` or `address`."""

    code, reason = grpc.StatusCode.ALREADY_EXISTS, "NODE_RUNNING"


class NodeDown(TasukiError):
    """No node runs in the state folder, or not the one the caller knew. metadata: `state_dir`, or `instance_id` of the other node."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "NODE_DOWN"


class ServiceFailed(TasukiError):
    """A service of the node ended unexpectedly. metadata: `service`, `log`."""

    code, reason = grpc.StatusCode.ABORTED, "SERVICE_FAILED"


class FleetMismatch(TasukiError):
    """A node does not match its fleet. metadata: `field`, `node_rank`, `expected` and `found`."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "FLEET_MISMATCH"


class HeldByFleet(TasukiError):
    """The node accepts commands from its fleet only. metadata: `fleet`, and `address` for clients to call."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "HELD_BY_FLEET"


class FleetEnded(TasukiError):
    """The fleet and its nodes have ended. Restart the job. metadata: `node_rank` of the node that caused it."""

    code, reason = grpc.StatusCode.ABORTED, "FLEET_ENDED"


class WeightsDiffer(TasukiError):
    """Nodes received different weights, which none of them serves. metadata: `nodes`, and `tensors` by index in name order."""

    code, reason = grpc.StatusCode.DATA_LOSS, "WEIGHTS_DIFFER"


class RewardFailed(TasukiError):
    """A reward function raised, timed out or returned no finite number. metadata: `sample`, `cause`."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "REWARD_FAILED"


def _subclasses(cls: type[TasukiError]) -> list[type[TasukiError]]:
    return [cls, *(below for sub in cls.__subclasses__() for below in _subclasses(sub))]


_BY_REASON: dict[str, type[TasukiError]] = {cls.reason: cls for cls in reversed(_subclasses(TasukiError))}
_BY_REASON["INTERNAL"] = InternalError


def from_reason(reason: str, message: str, metadata: dict[str, str]) -> TasukiError:
    """Builds the error for `reason`. An unknown reason becomes InternalError, with the reason in its metadata."""
    known = _BY_REASON.get(reason)
    cls = known if known is not None else InternalError
    error = cls.__new__(cls)
    TasukiError.__init__(error, message)
    error.metadata = dict(metadata) if known is not None else {**metadata, "reason": reason}
    return error


def to_status(error: TasukiError) -> grpc.Status:
    """Status with ErrorInfo, plus RetryInfo or PreconditionFailure if the code calls for it. Long texts are cut, and say so."""
    message = _cut(error.message, _MAX_MESSAGE_BYTES)
    metadata, left = dict[str, str](), _MAX_METADATA_BYTES
    for key, value in error.metadata.items():
        metadata[key] = _cut(value, left)
        left = max(0, left - len(metadata[key].encode()))
    details = [_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))]
    if error.code is grpc.StatusCode.UNAVAILABLE:
        delay = duration_pb2.Duration(seconds=int(RETRY_AFTER_S))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.code is grpc.StatusCode.FAILED_PRECONDITION:
        violation = error_details_pb2.PreconditionFailure.Violation(
            type=error.reason, subject=metadata.get("stage", ""), description=message
        )
        details.append(_packed(error_details_pb2.PreconditionFailure(violations=[violation])))
    if isinstance(error, InvalidArgument):
        field = error_details_pb2.BadRequest.FieldViolation(field=metadata.get("field", ""), description=message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[field])))
    return rpc_status.to_status(status_pb2.Status(code=error.code.value[0], message=message, details=details))


_BROKEN_OFF = "Internal error from Core"
"""grpc.aio's INTERNAL message for a connection that ended while messages were being sent."""
_TOO_MANY_CALLS = "Concurrent RPC limit exceeded!"
"""grpc.aio's RESOURCE_EXHAUSTED message for a call above the server's limit."""


def from_rpc_error(error: grpc.RpcError) -> TasukiError:
    """Converts a failed call to its TasukiError; without our ErrorInfo, to the nearest one for its status code."""
    call = cast(grpc.Call, error)  # the error of a call is the call
    status = rpc_status.from_call(call)
    code, text = call.code(), call.details() or ""
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return from_reason(info.reason, text, dict(info.metadata))
    # Cancelled by the server: a caller who cancels does not ask for the error.
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) or text == _BROKEN_OFF:
        cause = _innermost(text)
        problem = f"the service is not running or ended during the call ({cause}); see `tasuki state` and its log"
        return PeerUnavailable(problem, cause=cause)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the call did not end within its deadline (timeout_s of a client)")
    if text == _TOO_MANY_CALLS:
        return Busy("the port serves as many calls as it may at once; try again when others have ended")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return MessageTooLarge(text)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated(text)
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return PermissionDenied(text)
    return InternalError(f"{code.name}: {text}")


def _innermost(text: str) -> str:
    """Why a connection failed, without what gRPC's layers put before it."""
    last = text.rpartition("last error: ")[2]
    before = (
        r"(?:[A-Z_]+: )?(?:(?:ipv[46]|unix):\S+: )?(?:connect failed: addr: \S+ error: |Failed to connect to remote host: )?"
    )
    return re.sub(rf"^{before}", "", last) or text


def _cut(text: str, most_bytes: int) -> str:
    """The beginning of a text that is too long."""
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= most_bytes:
        return encoded.decode()
    return f"{encoded[:most_bytes].decode(errors='ignore')}... (cut; {len(text)} characters)"


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
