"""Messages of the wire from values that callers give, who may have no types."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tasuki.wire.errors import InvalidArgument

_Message = TypeVar("_Message", bound=Message)
TOKENIZE = "; tokenize a text or chat: tasuki.runs.tokenizer.ModelTokenizer(model_path).encode_prompt(prompt)"
_KINDS = {
    FieldDescriptor.CPPTYPE_INT32: f"a whole number from {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_INT64: f"a whole number from {-(2**63)} to {2**63 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"a whole number from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
}


def message_of(
    kind: type[_Message], values: Mapping[str, object], *, below: str = "", wanted: Mapping[str, str] | None = None
) -> _Message:
    """The message with these values; None leaves a field out.

    below: put before the names of fields in errors. wanted: the allowed values by field, where more is known than the type.
    Raises InvalidArgument naming a field whose value has the wrong type, is not finite or does not fit, and what to give.
    """
    message = kind()
    for name, value in values.items():
        if value is not None and not _takes(message, name, value):
            field: Any = kind.DESCRIPTOR.fields_by_name[name]
            known = _KINDS.get(field.cpp_type, "a finite number")
            allowed = (wanted or {}).get(name, f"a list, each entry {known}" if field.is_repeated else known)
            if name.endswith("token_ids") and _has_text(value):
                allowed += TOKENIZE
            raise InvalidArgument(f"{below}{name}", f"is {value!r:.80}; give {allowed}")
    return message


def _has_text(value: object) -> bool:
    return isinstance(value, str | dict) or (isinstance(value, Sequence) and any(isinstance(one, str | dict) for one in value))


def _takes(message: Message, name: str, value: Any) -> bool:
    """Sets a field. Returns False if the value cannot be sent; protobuf itself takes True for 1, and 1e39 for an infinite float."""
    field: Any = message.DESCRIPTOR.fields_by_name[name]
    is_flag = field.cpp_type == FieldDescriptor.CPPTYPE_BOOL
    try:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:  # numbers by number
            entries = getattr(message, name)
            for key, number in value.items():
                if isinstance(number, bool | np.bool_) or not math.isfinite(number):
                    return False
                entries[key] = number
            return True
        text = bytes if field.type == FieldDescriptor.TYPE_BYTES else str
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and isinstance(value, text) is field.is_repeated:
            return False  # one text is no list of texts
        if field.is_repeated:
            getattr(message, name).extend(value)
            return True
        if isinstance(value, bool | np.bool_) is not is_flag:
            return False
        setattr(message, name, bool(value) if is_flag else value)
        if isinstance(value, text):
            return True
        return math.isfinite(getattr(message, name))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return False
