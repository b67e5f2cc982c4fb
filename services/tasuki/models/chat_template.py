"""Renders chats by a model's Jinja template, in the environment that transformers documents for templates."""

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, UndefinedError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_items
from jinja2.parser import Parser
from jinja2.runtime import missing
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tasuki.wire.errors import InvalidArgument

Message = Mapping[str, Any]
# Noncharacters of Unicode, which no text contains.
_START, _END, _SENTINEL = "\ufdd0", "\ufdd1", "\ufdd3"
_KINDS = {"str": "text", "nonetype": "null", "dict": "object", "list": "array"}
IMAGE = "image"
"""Type of a part that stands for an image."""
_OWN_KEYS = ("role", "content", "weight")


class ChatTemplate:
    """A compiled template. Nothing of a message reaches the text as Python would print it."""

    def __init__(self, text: str, *, source: str) -> None:
        """source: the file, for errors. Raises InvalidArgument for a template that does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.undefined = _Undefined
        environment.filters |= {"tojson": _to_json, "items": _items}
        environment.tests["none"] = lambda value: value is None or isinstance(value, _Null)
        environment.tests["sameas"] = lambda value, other: value is other or (other is None and isinstance(value, _Null))
        environment.globals["raise_exception"] = _raise
        self._marks = next(one for one in environment.extensions.values() if isinstance(one, _Generation))
        try:
            tree = environment.parse(text)
            self.variables = meta.find_undeclared_variables(tree)
            """Names that the template takes from its caller."""
            self._template = environment.from_string(tree)
            self._source = source
            self._checked = set[bytes]()
        except (TemplateError, RecursionError) as error:
            line = f":{error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            problem = (
                f"{source}{line}: the chat template is no Jinja that tasuki knows: {one_line(error)}; correct or replace it"
            )
            raise InvalidArgument("model.path", problem) from error
        if "messages" not in self.variables:
            raise InvalidArgument(
                "model.path", f"{source}: the chat template does not read `messages`; take the model's own file"
            )

    @property
    def has_marks(self) -> bool:
        """Whether the template marks the assistant's text with `{% generation %}`."""
        return self._marks.is_used

    def check(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, field: str, drawn: Sequence[Message] = ()
    ) -> None:
        """Raises InvalidArgument for a key or content of a message that the template would drop. messages: settled.

        A key is read if the template takes it from the message among all, or as the last; `tools` and `documents` are if they change the
        text. Of chats that differ in their texts alone one is judged.
        drawn: the chat up to an answer of the policy, which are in `messages`, too, but not judged.
        """
        given = [{name for name, value in message.items() if value is not None and value != []} for message in messages]
        whole = [*drawn, *messages[len(drawn) :]]
        for index, names in enumerate(given):
            names.difference_update(_OWN_KEYS, _told_by_place(whole, index))
        probes = [_probe(message, index) for index, message in enumerate(messages)]
        told = json.dumps([probes, list(map(sorted, given)), len(drawn), variables], default=lambda clock: "")
        alike = sha256(told.encode()).digest()  # kept for each turn of a chat
        if alike in self._checked:
            return
        try:
            taken = self._taken(messages, variables) if any(given) else [set[str]()] * len(messages)
            text = self.render(probes, variables)
        except InvalidArgument:
            return  # raised again, by its cause, where the messages themselves are rendered
        for name in ("tools", "documents"):
            if variables.get(name) and not drawn:
                without = ""
                with suppress(InvalidArgument):  # a chat that it refuses without them
                    without = self.render(probes, {**variables, name: None})
                if text == without:
                    raise InvalidArgument(name, "the model's chat template does not write them for these messages; remove them")
        for index in range(len(drawn), len(messages)):
            names = given[index]
            if names - taken[index]:
                with suppress(InvalidArgument):  # a start of a chat that it refuses
                    names -= self._taken(messages[: index + 1], variables)[-1]
            if lost := sorted(names - taken[index]):
                problem = f"message {index} has `{lost[0]}`, which the model's chat template does not read; remove it"
                raise InvalidArgument(field, f"{problem}, or use a template that reads it")
            if not all(probe in text for probe in texts_of(probes[index]["content"])):
                beside = "the text beside `tool_calls` in " if messages[index].get("tool_calls") else ""
                problem = f"the model's chat template drops {beside}message {index}, of role {messages[index]['role']}"
                raise InvalidArgument(field, f"{problem}; remove it, or use a template that writes it")
        if not any(given):  # else what is taken may depend on the texts
            self._checked.add(alike)

    def settle(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[Message]:
        """Returns the messages with contents in the form that the template reads: lists of text parts, or else their text.

        Raises InvalidArgument for a content of several parts if the template reads only text, or as it refuses them itself.
        """
        if not any(isinstance(message["content"], list) for message in messages) or self._reads_parts(messages, variables):
            return list(messages)
        joined = [{**message, "content": "".join(texts_of(message["content"]))} for message in messages]
        settled = list(messages)
        for index, message in enumerate(messages):
            content = message["content"]
            if isinstance(content, list) and not self._reads_parts([*joined[:index], message, *joined[index + 1 :]], variables):
                if len(texts_of(content)) < len(content):
                    problem = f"message {index} has an image, but the model's chat template reads only text"
                    raise InvalidArgument("messages", f"{problem}; take the model's own template")
                if len(content) > 1:
                    problem = f"message {index} has {len(content)} text parts, but the model's chat template reads only text"
                    raise InvalidArgument("messages", f"{problem}; join them into one")
                settled[index] = joined[index]
        return settled

    def _reads_parts(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> bool:
        """Whether the template takes every text part. Raises InvalidArgument if it refuses a content of several as such."""
        guarded = [_guarded(message) for message in messages]
        contents = [message["content"] for message in guarded if isinstance(message["content"], list)]
        try:
            self._rendered(guarded, variables)
        except InvalidArgument as error:
            if isinstance(error.__cause__, _Refusal) and any(len(content) > 1 for content in contents):
                raise
            return False
        return all("text" in part._taken for content in contents for part in content if part.get("type") != IMAGE)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Raises InvalidArgument for messages that the template refuses or would print as Python's objects."""
        return self._rendered([_guarded(message) for message in messages], variables)

    def _taken(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[set[str]]:
        """The keys that the template takes from each message. Raises as `render`."""
        guarded = [_Object({key: _guarded(value) for key, value in message.items()}) for message in messages]
        self._rendered(guarded, variables)
        return [one._taken for one in guarded]

    def render_marked(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Also returns the start and end of each text that the template marks, in characters. Raises as `render`."""
        plain = self.render(messages, variables)
        with self._marks.shown():
            marked = self.render(messages, variables)
        spans: list[tuple[int, int]] = []
        text = ""
        for piece in marked.split(_START):
            inner, end, after = piece.partition(_END)
            if end:
                spans.append((len(text), len(text) + len(inner)))
            text += inner + after
        if text != plain:
            raise InvalidArgument("messages", "the chat template changes the text that it marks with {% generation %}")
        return plain, spans

    def _rendered(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        try:
            given = {name: value if value is None else _with_nulls(value) for name, value in variables.items()}
            return self._template.render(messages=messages, **given)
        except Exception as error:  # a template is foreign code and may raise anything
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
            where = f"{self._source}:{lines[-1]}" if lines else self._source
            problem = one_line(error)
            if isinstance(error, _WrongKind):
                places = list(_places(error.value, {"messages": messages, **variables}))
                problem = f"{f'`{places[0][1:]}`' if len(places) == 1 else 'a value'} {problem}"
            raise InvalidArgument("messages", f"{where}: the model's chat template refuses them: {problem}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Refusal(TemplateError):
    """Raised by a template's raise_exception."""


class _WrongKind(TemplateError):
    """A value that lacks what the template takes from it."""

    def __init__(self, value: object, lack: str) -> None:
        kind = type(value).__name__.strip("_").lower()
        super().__init__(f"is {_KINDS.get(kind, kind)} {lack}")
        self.value = value


class _Undefined(Undefined):
    def __init__(self, hint: str | None = None, obj: Any = missing, name: Any = None, exc: Any = UndefinedError) -> None:
        if hint is None and obj is not missing:
            exc = partial(_WrongKind, obj)
            hint = f"without `{name}`"
        super().__init__(hint, obj, name, exc)


def _items(value: Any) -> Any:
    if not isinstance(value, Mapping | Undefined):
        raise _WrongKind(value, "without items")
    return do_items(value)


def _places(value: object, within: object, at: str = "") -> Iterator[str]:
    """Yields where a value is, such as .messages[1].content."""
    if within is value:
        yield at
    elif isinstance(within, Mapping):
        for key, one in within.items():
            yield from _places(value, one, f"{at}.{key}")
    elif isinstance(within, list):
        for index, one in enumerate(within):
            yield from _places(value, one, f"{at}[{index}]")


class _Generation(Extension):
    """`{% generation %}`, around what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012
    is_used = False
    start = end = ""

    def parse(self, parser: Parser) -> nodes.Node:
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = (nodes.Output([self.attr(name)]).set_lineno(line) for name in ("start", "end"))
        return nodes.Scope([next(marks), *body, next(marks)]).set_lineno(line)

    @contextmanager
    def shown(self) -> Iterator[None]:
        self.start, self.end = _START, _END
        try:
            yield
        finally:
            self.start = self.end = ""


class _Unprintable:
    """Raises where Python would print its repr into a text."""

    def __str__(self) -> str:
        raise TypeError(f"it prints {self._kind} as if it were text; give text there, or a template that reads it")

    __repr__ = __str__
    _kind = "a null"


class _Null(_Unprintable):
    """null of a message. The template's `is none` is true for it."""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __hash__(self) -> int:
        return hash(None)


class _Array(_Unprintable, list[Any]):
    _kind = "a list"


class _Object(_Unprintable, dict[str, Any]):
    _kind = "an object"

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._taken = set[str]()
        """Keys that the template has taken or asked for."""

    def __getitem__(self, key: str) -> Any:
        self._taken.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._taken.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._taken.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self._taken.update(self.keys())
        return super().items()

    def __iter__(self) -> Iterator[str]:
        self._taken.update(self.keys())
        return super().__iter__()


def _told_by_place(messages: Sequence[Message], index: int) -> set[str]:
    """Keys of a tool's result that only repeat which call it answers: results follow in the order of their calls.

    Also the id of a call that the chat does not have, as it was trimmed or could not be read: nothing else has it.
    """
    first = index
    while first >= 0 and messages[first]["role"] == "tool":
        first -= 1
    calls = messages[first].get("tool_calls") if 0 <= first < index else None
    if messages[index]["role"] == "tool" and index - first > len(calls if isinstance(calls, list) else ()):
        lists = [given for message in messages if isinstance(given := message.get("tool_calls"), list)]
        known = [call.get("id") for given in lists for call in given if isinstance(call, Mapping)]
        return set() if messages[index].get("tool_call_id") in known else {"tool_call_id"}
    call = calls[index - first - 1] if isinstance(calls, list) and 0 < index - first <= len(calls) else None
    if not isinstance(call, Mapping):
        return set()
    function = call.get("function")
    told = {"tool_call_id": call.get("id"), "name": (function if isinstance(function, Mapping) else call).get("name")}
    return {key for key, value in told.items() if value in (None, messages[index].get(key))}


def _probe(message: Message, index: int) -> Message:
    """The message with texts that no other has in place of its own."""
    content = message["content"]
    if isinstance(content, list):
        parts = [
            {**part, "text": part["text"] and f"{_SENTINEL}{index}.{number}{_SENTINEL}"} if "text" in part else part
            for number, part in enumerate(content)
        ]
        return {**message, "content": parts}
    return {**message, "content": f"{_SENTINEL}{index}{_SENTINEL}"} if content else message


def texts_of(content: str | list[Any] | None) -> list[str]:
    """The texts of a content's parts."""
    return [part["text"] for part in content if "text" in part] if isinstance(content, list) else [content or ""]


def _guarded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Object({key: _guarded(one) for key, one in value.items()})
    if isinstance(value, list):
        return _Array(map(_guarded, value))
    return _Null() if value is None else value


def _with_nulls(value: Any) -> Any:
    """The value with nulls that no template prints."""
    if isinstance(value, Mapping):
        return {key: _with_nulls(one) for key, one in value.items()}
    return [*map(_with_nulls, value)] if isinstance(value, list) else _Null() if value is None else value


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, does not escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_null_as_json
    )


def _null_as_json(value: object) -> None:
    if not isinstance(value, _Null):
        raise TypeError(f"{type(value).__name__} is not JSON")


def _raise(problem: str) -> None:
    raise _Refusal(problem)
