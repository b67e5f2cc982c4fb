"""The error table, both ways: a caller catches the error that a service raises."""

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tasuki.wire import errors
from tasuki.wire.errors import InternalError, InvalidArgument, TasukiError, from_rpc_error, to_status


class FailedCall(grpc.RpcError):
    """Error that a client's stub raises for a status."""

    def __init__(self, status: grpc.Status) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata


ERRORS = [
    cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, TasukiError) and cls is not TasukiError
]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_error_comes_back_as_itself(cls: type[TasukiError]) -> None:
    sent = errors.from_reason(cls.reason, "needs 12 bytes, 9 free", {"needed_bytes": "12", "stage": "SYNC"})
    assert type(sent) is cls
    status = to_status(sent)
    received = from_rpc_error(FailedCall(status))
    assert type(received) is cls
    assert (received.message, received.metadata) == (sent.message, sent.metadata)
    assert status.code is cls.code


def test_reasons_are_unique() -> None:
    assert len({cls.reason for cls in ERRORS}) == len(ERRORS)


def details_of(error: TasukiError) -> list[any_pb2.Any]:
    (status,) = [value for key, value in to_status(error).trailing_metadata if key == "grpc-status-details-bin"]
    return list(status_pb2.Status.FromString(status).details)


def test_unavailable_carries_retry_info() -> None:
    assert any(detail.type_url.endswith("/google.rpc.RetryInfo") for detail in details_of(errors.Asleep("asleep")))


def test_invalid_argument_carries_the_field() -> None:
    found = [
        violation.field
        for detail in details_of(InvalidArgument("num_samples", "must be at least 1, got 0"))
        if (bad := error_details_pb2.BadRequest()) is not None and detail.Unpack(bad)
        for violation in bad.field_violations
    ]
    assert found == ["num_samples"]


def test_reason_of_a_newer_build_is_kept() -> None:
    info = error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain=errors.DOMAIN)
    packed = any_pb2.Any()
    packed.Pack(info)
    status = rpc_status.to_status(status_pb2.Status(code=9, message="new", details=[packed]))
    error = from_rpc_error(FailedCall(status))
    assert isinstance(error, InternalError)
    assert error.metadata["reason"] == "FROM_THE_FUTURE"


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("seeded sampling is off", "seed: seeded sampling is off"),
        ("seed = 3 is taken", "seed = 3 is taken"),
        ("is taken", "seed: is taken"),
    ],
)
def test_an_invalid_argument_names_its_field_once(problem: str, message: str) -> None:
    assert InvalidArgument("seed", problem).message == message
