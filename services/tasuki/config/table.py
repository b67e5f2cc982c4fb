"""Base of every table of the configuration."""

from typing import Annotated

from annotated_types import Gt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from tasuki.wire.address import split_host_port


def _in_bytes(value: object, read: ValidatorFunctionWrapHandler) -> ByteSize:
    try:
        return read(None if isinstance(value, bool) else value)
    except ValidationError:
        raise ValueError('give a whole number of bytes above 0, or text such as "8GB" or "512MiB"') from None


def _check_address(address: str) -> str:
    split_host_port(address)
    return address


def _check_listen(listen: str) -> str:
    if listen == UNIX:
        return listen
    try:
        port = split_host_port(listen)[1]
    except ValueError as error:
        raise ValueError(f'must be "{UNIX}", or {str(error).removeprefix("must be ")}') from error
    if port > _MAX_PORT - 2:
        raise ValueError(f"needs two ports after it, and {_MAX_PORT} is the last")
    return listen


UNIX = "unix"
_MAX_PORT = 65_535
Bytes = Annotated[ByteSize, Field(gt=0), WrapValidator(_in_bytes)]
"""A positive number of bytes, or text such as "8GB"."""
Address = Annotated[str, AfterValidator(_check_address)]
"""HOST:PORT."""
Listen = Annotated[str, AfterValidator(_check_listen)]
# Seeds accepted by numpy, torch and SGLang alike.
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**32)]
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
PositiveInt = Annotated[int, Strict(), Gt(0)]
PositiveFloat = Annotated[float, Strict(), Gt(0)]


class Schema(BaseModel):
    """Base of every table: frozen, without unknown keys. Its numbers and booleans are strict."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


UUID = "GPU-"
MAX_GPUS = 1024
"""Bound on a node's GPU numbers, to catch typos."""
_MAX_NUMBER = MAX_GPUS - 1


def _one_name(device: str) -> str:
    """Normalizes a name: numbers without leading zeros, UUIDs in lower case."""
    if not device.isdecimal():
        return f"{UUID}{device.removeprefix(UUID).lower()}"
    number = device.lstrip("0") or "0"
    if len(number) > len(str(_MAX_NUMBER)) or int(number) > _MAX_NUMBER:
        raise ValueError(f"a GPU's number is at most {_MAX_NUMBER}")
    return number


def _check_distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names one of them twice")
    return names


Distinct = AfterValidator(_check_distinct)


Device = Annotated[
    str,
    BeforeValidator(lambda device: str(device) if type(device) is int else device),
    Field(pattern=rf"^({UUID}[0-9a-fA-F-]+|[0-9]+)$"),
    AfterValidator(_one_name),
]
Devices = Annotated[tuple[Device, ...], Distinct]
