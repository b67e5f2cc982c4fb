"""Prints docs/reference/config.md: every key of the configuration, from the schema itself."""

import ast
import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tasuki.algorithms.loss_types import Correction, LossConfig
from tasuki.algorithms.losses import LOSSES
from tasuki.config.environment import VARIABLES
from tasuki.config.schema import NodeConfig
from tasuki.config.table import Device
from tasuki.config.train_schema import LOSS_KEYS

HEAD = """# Configuration

One TOML file configures a node and its run. Unknown keys and values out of range are errors that name the key. On the command line
`--set trainer.num_ranks=4` overrides a key, and may be repeated. Relative paths in the file are relative to the file's folder; on the
command line, to the working folder. `tasuki config CONFIG` prints every key with its value and origin: default, file or `--set`. Commands
warn of settings without effect. A dot leads into a table: `value_loss.clip` below `[train]` is `clip` of `[train.value_loss]`.
`tools/config_page.py` generates this page from `tasuki.config.schema`.
"""

_SHORT = 2
"""Keys of a table that is listed in the section of the table above it."""

VARIABLES_HEAD = """A node's place in its fleet comes from its scheduler's variables
([several-nodes.md](../guides/several-nodes.md)), and the containers have their own ([deploy.md](../guides/deploy.md)). Besides these:

"""


def page() -> str:
    variables = "".join(f"- `{name}`: {meaning}\n" for name, meaning in VARIABLES.items())
    return f"{HEAD}{''.join(_tables(NodeConfig, ''))}\n## Environment variables\n\n{VARIABLES_HEAD}{variables}"


def _tables(table: type[BaseModel], name: str) -> Iterator[str]:
    """Yields the section of a table, with its short sub-tables, then those of its other sub-tables."""
    below: list[tuple[Any, str]] = []
    yield f"\n## {f'`[{name}]`' if name else 'Top of the file'}\n\n| key | value | default | meaning |\n|---|---|---|---|\n"
    for key, kind, row in _rows(table):
        below.extend([] if row else [(kind, key)])
        yield row
    for kind, key in below:
        full_name = f"{name}.{key}" if name else key
        if kind is LossConfig:
            yield from _loss_tables(full_name)
        else:
            yield from _tables(kind, full_name)


def _rows(table: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields each key, its type and its row, which is empty for a sub-table with a section of its own."""
    for key, field in table.model_fields.items():
        kind = _without_none(field.annotation)
        if _is_table(kind) and len(kind.model_fields) <= _SHORT:
            yield from _rows(kind, f"{prefix}{key}.")
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and len(dataclasses.fields(kind)) <= _SHORT:
            for inner, *cells in _dataclass_rows(kind):
                yield inner, kind, f"| `{prefix}{key}.{inner}` | {' | '.join(cells)} |\n"
        elif _is_table(kind) or dataclasses.is_dataclass(kind):
            yield key, kind, ""
        else:
            meaning = " ".join((field.description or "").split())
            yield key, kind, f"| `{prefix}{key}` | {_value(kind, field)} | {_default(field)} | {meaning} |\n"


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _loss_tables(name: str) -> Iterator[str]:
    """Yields the section of a loss and of its correction; their keys come from dataclasses."""
    learning = {loss: cls for loss, cls in LOSSES.items() if LossConfig(loss=cls()).has_advantages}
    yield f"\n## `[{name}]`\n\n| key | of | value | default | meaning |\n|---|---|---|---|---|\n"
    names = " or ".join(f'`"{loss}"`' for loss in learning)
    yield f'| `name` | every loss | {names} | `"ppo"` | Which loss; docs/reference/algorithms.md has the formulas. |\n'
    tables = [("every loss", LossConfig), *((f'`"{loss}"`', cls) for loss, cls in learning.items())]
    rows: dict[str, list[tuple[str, ...]]] = {}
    for owner, cls in tables:
        for key, *row in _dataclass_rows(cls):
            if cls is not LossConfig or (key in LOSS_KEYS and key != "correction"):
                rows.setdefault(key, []).append((owner, *row))
    for key, owners in rows.items():
        of, _, defaults, _ = (", ".join(filter(None, column)) for column in zip(*owners, strict=True))
        meanings = ", ".join(dict.fromkeys(filter(None, (meaning for *_, meaning in owners))))
        yield f"| `{key}` | {of} | {owners[0][1]} | {defaults} | {meanings} |\n"
    for key, value, default, meaning in _dataclass_rows(Correction):
        yield f"| `correction.{key}` | every loss | {value} | {default} | {meaning} |\n"
    yield "\nOnly corrections that a table `[train.loss.correction]` names apply; an empty one means none. Without it the defaults apply.\n"


def _dataclass_rows(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """Yields key, value, default and meaning of each field."""
    kinds, meanings, defaults = get_type_hints(cls), _attribute_docstrings(cls), cls()
    for field in dataclasses.fields(cls):
        default = getattr(defaults, field.name)
        shown = "none" if default is None else f"`{json.dumps(default)}`" if not dataclasses.is_dataclass(default) else ""
        yield field.name, _plain_value(_without_none(kinds[field.name])), shown, meanings.get(field.name, "")


def _plain_value(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return " or ".join(f'`"{choice}"`' for choice in kind)
    if get_origin(kind) is Literal:
        return " or ".join(f'`"{choice}"`' for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"[{', '.join(_plain_value(part) for part in get_args(kind))}]"
    return kind.__name__ if isinstance(kind, type) else ""


def _attribute_docstrings(cls: type) -> dict[str, str]:
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _without_none(annotation: Any) -> Any:
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    is_optional = get_origin(annotation) is not Literal and type(None) in get_args(annotation)
    return Union[tuple(kinds)] if is_optional else annotation  # noqa: UP007 - built at run time


def _value(kind: Any, field: FieldInfo) -> str:
    if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) in (tuple, Union, UnionType):
        return _value(get_args(kind)[0], field)
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, StrEnum)):
        return " or ".join(f'`"{one}"`' if isinstance(one, str) else str(one).lower() for one in get_args(kind) or kind)
    if get_origin(kind) is tuple and get_args(kind)[1:] == (...,):
        return f"[{_value(get_args(kind)[0], field)}, ...]"
    if get_origin(kind) is tuple:
        return f"[{', '.join(_value(part, field) for part in get_args(kind))}]"
    if get_origin(kind) is dict:
        return "values by name"
    if kind == Device:
        return "int or string"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_value(part, field) for part in get_args(kind))
    limits = (*getattr(kind, "__metadata__", ()), *field.metadata)  # from Annotated, if the type has any
    plain = getattr(kind, "__origin__", kind)
    bounds = [_bound(limit) for limit in limits]
    name = {"str": "string", "bool": "true or false", "ByteSize": "int or string"}.get(plain.__name__, plain.__name__.lower())
    return f"{name} {' and '.join(bound for bound in bounds if bound)}".rstrip()


def _bound(limit: object) -> str:
    match limit:
        case Gt(gt=bound):
            return f"> {bound}"
        case Ge(ge=bound):
            return f">= {bound}"
        case Lt(lt=bound):
            return f"< {bound}"
        case Le(le=int() | float() as bound):
            return f"<= {int(bound) if bound == int(bound) else bound}"
        case _:
            return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


if __name__ == "__main__":
    sys.stdout.write(page())
