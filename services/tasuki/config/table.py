"""Base of every table of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from tasuki.wire.address import split_host_port


def _in_bytes(value: object, read: ValidatorFunctionWrapHandler) -> ByteSize:
    try:
        return read(value)
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
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Schema(BaseModel):
    """Base of every table: frozen, without unknown keys, and without text or booleans in place of numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name is not None:
            check_kind(value, cls.model_fields[info.field_name].annotation)
        return value


def check_kind(value: object, annotation: Any) -> None:
    """Raises ValueError for a number or boolean in quotes and for a boolean in place of a number.

    pydantic accepts all of these, and its strict mode would refuse TOML's arrays and paths. annotation: of the field.
    """
    kinds = list(_kinds(annotation))
    if isinstance(value, Sequence) and not isinstance(value, str):
        elements = [element for kind in kinds if get_origin(kind) is tuple for element in get_args(kind) if element is not ...]
        for one in value if elements else ():
            check_kind(one, Union[tuple(elements)])  # noqa: UP007  made from a list
        return
    is_number, is_bool = any(kind in (int, float, ByteSize) for kind in kinds), bool in kinds
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    quoted = " or ".join(f'"{word}"' for word in words if isinstance(word, str))
    other = f", or {quoted}" if quoted else ""
    if isinstance(value, bool) and is_number and not is_bool:
        raise ValueError(f"give a number{other}")
    is_text = any(kind in (str, Path, ByteSize, Any, object) for kind in kinds) or value in words
    if isinstance(value, str) and not is_text and (is_number or is_bool):
        wanted = "a number" if is_number else "true or false"
        raise ValueError(f"give {wanted}, without quotes{other}")


def _kinds(annotation: Any) -> Iterator[Any]:
    """Types that a value may have, with Annotated and Union unwrapped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for each in get_args(annotation):
            yield from _kinds(each)
    else:
        yield annotation


UUID = "GPU-"
MAX_GPUS = 1024
"""Bound on a node's GPU numbers, to catch typos."""
_MAX_NUMBER = MAX_GPUS - 1


def _text_of_number(device: object) -> object:
    return str(device) if type(device) is int else device


def _one_name(device: str) -> str:
    """Normalizes a name: numbers without leading zeros, UUIDs in lower case."""
    if not device.isdecimal():
        return f"{UUID}{device.removeprefix(UUID).lower()}"
    number = device.lstrip("0") or "0"
    if len(number) > len(str(_MAX_NUMBER)) or int(number) > _MAX_NUMBER:
        raise ValueError(f"a GPU's number is at most {_MAX_NUMBER}")
    return number


def _distinct(devices: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(devices)) < len(devices):
        raise ValueError("names a GPU twice")
    return devices


Device = Annotated[
    str, BeforeValidator(_text_of_number), Field(pattern=rf"^({UUID}[0-9a-fA-F-]+|[0-9]+)$"), AfterValidator(_one_name)
]
Devices = Annotated[tuple[Device, ...], AfterValidator(_distinct)]
