"""Converts a loss message to its dataclass; fields have the same names in both."""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from typing import Any, TypeVar, get_args

from google.protobuf.message import Message

from tasuki.algorithms.loss_types import Aggregation, Correction, KlEstimator, Loss, LossConfig, OldPolicy, SettingError
from tasuki.v1 import loss_pb2
from tasuki.wire.errors import InvalidArgument

_Enum = TypeVar("_Enum", bound=StrEnum)
_LOSSES: dict[str, type] = {loss.__name__: loss for loss in get_args(Loss)}


def decode_loss(message: loss_pb2.LossConfig) -> LossConfig:
    """Unset fields take the dataclass's defaults. Raises InvalidArgument naming the field."""
    kind = message.WhichOneof("loss")
    if kind is None:
        raise InvalidArgument("header.loss", f"give one of {', '.join(_oneof_names())}")
    settings = _set_fields(message, ("aggregation_length", "kl_coef", "entropy_coef", "denominator"))
    if message.HasField("correction"):
        settings["correction"] = _built(Correction, _correction_fields(message.correction), prefix="header.loss.correction")
    for name, enum in (("aggregation", Aggregation), ("kl_estimator", KlEstimator), ("old_policy", OldPolicy)):
        if number := getattr(message, name):
            settings[name] = _enum(enum, number, field=name)
    inner: Message = getattr(message, kind)
    cls = _LOSSES[inner.DESCRIPTOR.name]
    settings["loss"] = _built(cls, _set_fields(inner, [field.name for field in fields(cls)]), prefix=f"header.loss.{kind}")
    return _built(LossConfig, settings, prefix="header.loss")


def _oneof_names() -> list[str]:
    return [field.name for field in loss_pb2.LossConfig.DESCRIPTOR.oneofs_by_name["loss"].fields]


def _set_fields(message: Message, names: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _correction_fields(message: loss_pb2.Correction) -> dict[str, Any]:
    """Fields of a correction; an empty message disables it."""
    numbers = dict.fromkeys(("token_truncation", "sequence_truncation"))
    bounds = {name: getattr(message, name) for name in ("token_mask", "geometric_mask") if message.HasField(name)}
    return numbers | _set_fields(message, numbers) | {name: (bound.low, bound.high) for name, bound in bounds.items()}


def _enum(enum: type[_Enum], number: int, *, field: str) -> _Enum:
    """Converts an enum number; values are the message's names in lower case, without the prefix."""
    values = loss_pb2.DESCRIPTOR.enum_types_by_name[enum.__name__].values_by_number
    prefix = values[0].name.removesuffix("UNSPECIFIED")
    if number not in values:
        raise InvalidArgument(f"header.loss.{field}", f"{number} is unknown; give one of {', '.join(enum)}")
    return enum(values[number].name.removeprefix(prefix).lower())


def _built(cls: type, settings: dict[str, Any], *, prefix: str) -> Any:
    try:
        return cls(**settings)
    except SettingError as error:
        raise InvalidArgument(f"{prefix}.{error.field}", error.problem) from error
