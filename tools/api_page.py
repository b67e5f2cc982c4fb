"""Prints docs/reference/api.md: every public name of the client, from its signature and docstring."""

import ast
import dataclasses
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

import tasuki.client
from tasuki.algorithms.loss_types import Correction
from tasuki.client.async_client import AsyncClient

HEAD = """# Python API

`from tasuki.client import ...`: every public name with its signature, shapes, units and errors. [python.md](../guides/python.md) says how
to use them, [errors.md](errors.md) what each error means. `TokenIds` is a sequence or array of integers, `[T]` an array with one entry
for each completion token. Sizes are in bytes, times in seconds. `tools/api_page.py` makes this page out of the docstrings.

The verbs in one program:

```python
from tasuki.client import Client, Phase, Role, SamplingParams, TrainingSample

with Client(state_dir="node") as client:
    client.begin_run()
    samples = client.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8), num_samples=4)
    for sample in client.generate_stream([[5, 6, 7], [8]], SamplingParams(max_new_tokens=8)):
        print(sample.prompt_index, sample.token_ids, sample.finish_reason)
    batch = [TrainingSample.of(sample, advantages=index - 1.5) for index, sample in enumerate(samples)]
    print(client.compute_log_probs(batch, role=Role.REFERENCE)[0])
    for part in (batch[:2], batch[2:]):
        client.forward_backward(part, step_samples=batch)
    print(client.optim_step(learning_rate=1e-5).grad_norm)
    done = client.forward_backward_custom(batch, lambda samples, log_probs: sum(row.square().mean() for row in log_probs))
    client.discard_gradients()
    client.save("checkpoint")
    client.load("checkpoint")
    client.export_model("exported")
    client.acquire(Phase.ROLLOUT)
    print(client.changeovers(limit=1)[0].stages[0].seconds, client.rollout_state().stop_token_ids)
    for watched in client.watch():
        print(Phase.of(watched.state.phase), client.trainer_state().policy_version)
        break
```
"""
LOSSES = (
    "A field is a key of [`[train.loss]`](config.md#trainloss), its `correction`, or [`[train.value_loss]`](config.md#train)."
)
OF_RESULTS = "Fields beside a name explain themselves."
# Listed last on the page: results of the verbs.
RESULTS = (
    "ForwardBackwardResult", "OptimStepResult", "SaveResult", "NodeState", "TrainerState", "RolloutState", "StageEvent", "StageStatus",
    "Changeover", "Watched",
)  # fmt: skip

_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: "int",
    FieldDescriptor.CPPTYPE_INT64: "int",
    FieldDescriptor.CPPTYPE_UINT32: "int",
    FieldDescriptor.CPPTYPE_UINT64: "int",
    FieldDescriptor.CPPTYPE_DOUBLE: "float",
    FieldDescriptor.CPPTYPE_FLOAT: "float",
    FieldDescriptor.CPPTYPE_BOOL: "bool",
}


def page() -> str:
    return HEAD + "".join(_sections())


def public_names() -> list[tuple[str, Any]]:
    """Returns the public names in the order of the page."""
    return [(name, getattr(tasuki.client, name)) for name in sorted(tasuki.client.__all__, key=_place)]


def _place(name: str) -> tuple[int, int, str]:
    first = ("AsyncClient", "Client", "Sample", "TrainingSample", "SamplingParams")
    if name in RESULTS:
        return (2, RESULTS.index(name), "")
    return (0, first.index(name), "") if name in first else (1, 0, name)


def _sections() -> Iterator[str]:
    losses, enums, results = list[str](), list[str](), list[str]()
    for name, value in public_names():
        if inspect.isfunction(value):
            yield f"\n## `{name}`\n\n{_function(name, value)}"
        elif issubclass(value, enum.Enum):
            enums.append(_enum(value))
        elif issubclass(value, Message):
            results.extend(_message(name, value))
        elif value is Correction or value.__module__.startswith("tasuki.algorithms.losses."):
            losses.append(_row(f"`{name}`", ", ".join(f"{one} {kind}" for one, kind, _ in _fields(value)), _text(value)))
        elif name in RESULTS:
            results.append(_row(f"**`{name}`**", ", ".join(f"{one} {kind}" for one, kind, _ in _fields(value)), _text(value)))
        elif dataclasses.is_dataclass(value):
            yield f"\n## `{name}`\n\n{''.join(_dataclass(value))}"
        elif value is not tasuki.client.Client:
            yield f"\n## `{name}`\n\n{''.join(_class(value))}"
    yield f"\n## Losses\n\n{LOSSES}\n\n| class | fields | meaning |\n|---|---|---|\n{''.join(losses)}"
    yield f"\n## Enums\n\n| enum | meaning | members |\n|---|---|---|\n{''.join(enums)}"
    yield f"\n## Results\n\n{OF_RESULTS}\n\n| result, field | type | meaning |\n|---|---|---|\n{''.join(results)}"


def _function(name: str, function: Any) -> str:
    """A list entry: the signature, then the docstring."""
    keyword = "async def" if inspect.iscoroutinefunction(function) else "def"
    signature, written = inspect.signature(function), _annotations(function)
    parts: list[str] = []
    for one in signature.parameters.values():
        if one.name not in ("self", "cls"):
            if one.kind == one.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            value = one.default
            default = f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
            default = default if isinstance(value, str) else _plain(default)
            parts.append(f"{one.name}: {written[one.name]}" + ("" if one.default is one.empty else f" = {default}"))
    head, tail = ("class", "") if function.__name__ == "__init__" else (keyword, f" -> {written['return']}")
    text = "" if function.__doc__ == object.__init__.__doc__ else _text(function)
    about = f"  \n  {text}" if text else ""
    return f"- `{head} {name}({', '.join(parts)}){tail}`{about}\n"


def _class(cls: type) -> Iterator[str]:
    yield f"{_text(cls)}\n\n"
    if cls is AsyncClient:
        yield "`Client` has the same signature and verbs without `await`; streams are plain generators. Close it, or use `with`.\n\n"
    yield _function(cls.__name__, cls.__init__)
    for name, method in _methods(cls):
        yield _function(name, method)


def _methods(cls: type) -> list[tuple[str, Any]]:
    """Returns the public methods, in source order."""
    return [(name, method) for name, method in vars(cls).items() if not name.startswith("_") and inspect.isfunction(method)]


def _enum(cls: type[enum.Enum]) -> str:
    about = _member_docstrings(cls)
    told = [f"`{member.value}`" + (f": {about[member.name]}" if member.name in about else "") for member in cls]
    return _row(f"`{cls.__name__}`", _text(cls), ("<br>" if about else ", ").join(told))


def _dataclass(cls: Any) -> Iterator[str]:
    plain = [f"{name} {kind}" for name, kind, meaning in _fields(cls) if not meaning]
    rows = [_row(*field) for field in _fields(cls) if field[2]]
    yield f"{_text(cls)}\n"
    if rows:
        yield f"\n| field | type, default | meaning |\n|---|---|---|\n{''.join(rows)}"
    if plain:
        yield f"\n{'Further' if rows else 'The'} fields: {', '.join(plain)}.\n"
    made = [(name, one.__func__) for name, one in vars(cls).items() if isinstance(one, classmethod)]
    yield ("\n" if made else "") + "".join(_function(f"{cls.__name__}.{name}", method) for name, method in made)


def _fields(cls: Any) -> Iterator[tuple[str, str, str]]:
    """Each field of a dataclass, its type with the default, and its meaning, if it has one."""
    about, written = _member_docstrings(cls), dict[str, str]()
    for base in reversed(cls.__mro__[:-1]):
        written |= _annotations(base)
    for one in dataclasses.fields(cls):
        yield f"`{one.name}`", f"`{written[one.name]}{_default(one)}`", about.get(one.name, "")


def _message(shown: str, cls: type[Message]) -> Iterator[str]:
    """Rows of a message of the wire, with the comments of its .proto file: first the fields whose name says all."""
    source = Path(inspect.getfile(sys.modules[cls.__module__])).with_suffix(".pyi").read_text()
    (tree,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    about = {target.id: text for target, text in _documented(tree)}
    about |= {one.name: ast.get_docstring(one) or "" for one in tree.body if isinstance(one, ast.FunctionDef)}
    fields = [(field.name, f"`{_kind(field)}`") for field in cls.DESCRIPTOR.fields]
    plain = (f"`{name}` {kind}" for name, kind in fields if not about.get(name))
    yield _row(f"**`{shown}`**", ", ".join(plain), ast.get_docstring(tree) or "")
    yield from (_row(f"`.{name}`", kind, about[name]) for name, kind in fields if about.get(name))


def _row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |\n"


def _kind(field: Any) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map of {_kind(key)} to {_kind(value)}"
    named = field.message_type or field.enum_type
    kind = (
        named.name
        if named is not None
        else _SCALARS.get(field.cpp_type, "bytes" if field.type == FieldDescriptor.TYPE_BYTES else "str")
    )
    return (
        f"list of {kind}"
        if field.is_repeated
        else f"{kind}, may be absent"
        if field.has_presence and not field.message_type
        else kind
    )


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default.value if isinstance(field.default, enum.Enum) else field.default
        return f" = {value!r}"
    if field.default_factory is not dataclasses.MISSING:
        return f" = {getattr(field.default_factory, '__name__', 'made')}()"
    return ""


def _member_docstrings(cls: type) -> dict[str, str]:
    """Returns the strings below fields and members, which Python does not keep at run time."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {target.id: text for target, text in _documented(tree)}


def _annotations(value: Any) -> dict[str, str]:
    """Returns annotations of a function's parameters and result, or of a class's fields, as written in the source."""
    if not inspect.isclass(value) and not hasattr(value, "__code__"):
        return {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    if isinstance(tree, ast.ClassDef):
        found = {
            one.target.id: one.annotation
            for one in tree.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
    else:
        assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
        arguments = (*tree.args.posonlyargs, *tree.args.args, tree.args.vararg, *tree.args.kwonlyargs, tree.args.kwarg)
        found = {one.arg: one.annotation for one in arguments if one is not None} | {"return": tree.returns}
    return {
        name: str(each.value) if isinstance(each, ast.Constant) else ast.unparse(each)
        for name, each in found.items()
        if each is not None
    }


def _documented(tree: ast.ClassDef) -> Iterator[tuple[ast.Name, str]]:
    """Fields and members, each with the string below it."""
    for field, text in pairwise(tree.body):
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            targets = (
                [field.target] if isinstance(field, ast.AnnAssign) else field.targets if isinstance(field, ast.Assign) else []
            )
            yield from ((target, text.value.value) for target in targets if isinstance(target, ast.Name))


def _text(value: Any) -> str:
    """Returns a docstring in one paragraph; "" without one."""
    return " ".join((value.__doc__ or "").split())


def _plain(text: str) -> str:
    """Strips quotes and module names from annotations, as written in the source."""
    text = re.sub(r"'([A-Za-z][^']*)'", r"\1", text)
    return re.sub(r"<(?:class )?'?(?:\w+\.)*(\w+)[^>]*>", r"\1", text)


def undocumented() -> list[str]:
    """Returns the public names that lack a docstring."""
    lacking = [name for name, value in public_names() if not _own_docstring(value)]
    return lacking + [f"AsyncClient.{name}" for name, method in _methods(AsyncClient) if not method.__doc__]


def _own_docstring(value: Any) -> bool:
    if inspect.isclass(value) and issubclass(value, Message):
        return True  # its .proto file has the comments
    text = value.__doc__ or ""
    # Python gives a dataclass without a docstring its signature.
    return bool(text) and not text.startswith(f"{value.__name__}(")


if __name__ == "__main__":
    sys.stdout.write(page())
