"""Converts a loss message to its settings."""

from __future__ import annotations

from google.protobuf.struct_pb2 import Value

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.setting import SettingError
from tasuki.v1 import loss_pb2
from tasuki.wire.errors import InvalidArgument


def decode_loss(message: loss_pb2.LossConfig) -> LossConfig:
    """Settings that are not given take their defaults. Raises InvalidArgument naming the field."""
    try:
        return LossConfig.read(message.name, {key: _plain(value) for key, value in message.settings.fields.items()})
    except SettingError as error:
        field = "name" if error.field == "name" else f"settings.{error.field}"
        raise InvalidArgument(f"header.loss.{field}", error.problem) from error


def _plain(value: Value) -> object:
    match value.WhichOneof("kind"):
        case "struct_value":
            return {key: _plain(each) for key, each in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(each) for each in value.list_value.values]
        case None | "null_value":
            return None
        case kind:
            return getattr(value, kind)
