"""Prints docs/config.md: every key of the configuration, from the schema itself. Usage: python tools/config_page.py > docs/config.md"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tasuki.config.devices import Device
from tasuki.config.schema import NodeConfig

HEAD = """# Configuration

One TOML file tells a node everything. Unknown keys are errors, and so are values out of range; the message names the key. On the command
line `--set trainer.num_ranks=4` overrides a key, and may be given more than once. Relative paths in the file are relative to the file's
folder; on the command line, to the working folder. This page is made by `tools/config_page.py` out of `tasuki.config.schema`.
"""


def page() -> str:
    return HEAD + "".join(_tables(NodeConfig, ""))


def _tables(table: type[BaseModel], name: str) -> Iterator[str]:
    """The section of one table, then those of the tables below it."""
    below: list[tuple[type[BaseModel], str]] = []
    yield f"\n## {f'`[{name}]`' if name else 'Top of the file'}\n\n| key | value | default | meaning |\n|---|---|---|---|\n"
    for key, field in table.model_fields.items():
        kind = _without_none(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            below.append((kind, f"{name}.{key}" if name else key))
        else:
            if get_origin(kind) is dict:
                below.append((get_args(kind)[1], f"{name}.{key}.NAME"))
            meaning = " ".join((field.description or "").split())
            yield f"| `{key}` | {_value(kind, field)} | {_default(field)} | {meaning} |\n"
    for kind, full_name in below:
        yield from _tables(kind, full_name)


def _without_none(annotation: Any) -> Any:
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    is_optional = get_origin(annotation) is not Literal and type(None) in get_args(annotation)
    return Union[tuple(kinds)] if is_optional else annotation  # noqa: UP007 - built at run time


def _value(kind: Any, field: FieldInfo) -> str:
    if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) is tuple:
        return _value(get_args(kind)[0], field)
    if get_origin(kind) is Literal:
        return " or ".join(f'`"{choice}"`' for choice in get_args(kind))
    if get_origin(kind) is tuple and get_args(kind)[1:] == (...,):
        return f"[{_value(get_args(kind)[0], field)}, ...]"
    if get_origin(kind) is tuple:
        return f"[{', '.join(_value(part, field) for part in get_args(kind))}]"
    if get_origin(kind) is dict or is_dataclass(kind):
        return "table"
    if kind == Device:
        return "int or string"
    limits = (*getattr(kind, "__metadata__", ()), *field.metadata)  # Annotated's, where the type has any
    plain = getattr(kind, "__origin__", kind)
    bounds = [_bound(limit) for limit in limits]
    name = {"str": "string", "bool": "true or false", "ByteSize": "int or string"}.get(plain.__name__, plain.__name__.lower())
    return " ".join([name, *(bound for bound in bounds if bound)])


def _bound(limit: object) -> str:
    match limit:
        case Gt(gt=bound):
            return f"> {bound}"
        case Ge(ge=bound):
            return f">= {bound}"
        case Le(le=bound):
            return f"<= {bound}"
        case Lt(lt=bound):
            return f"< {bound}"
        case _:
            return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if is_dataclass(field.default):
        return "its defaults"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


if __name__ == "__main__":
    sys.stdout.write(page())
