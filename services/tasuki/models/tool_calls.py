"""Reads tool calls in the form in which a model's own chat template writes them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tasuki.models.chat_template import Message
from tasuki.wire.errors import InvalidArgument

_NAME, _KEY, _VALUE = "tool_name", "argument_name", "argument_value"
_TEXT = "written beside the call"
_CALL = {"type": "function", "id": "000000000"}
_ODD = {"text": '"q"\n{[é]}', "number": -1.5, "list": [{"key": None}]}
_TOOLS = {_NAME: {"properties": {name: {"type": kind} for name, kind in zip(_ODD, ("string", "number", "array"), strict=True)}}}
_QUESTION: Message = {"role": "user", "content": "question"}
_END_OF_THOUGHT = "</think>"
_NAMED = re.compile(r'\s*(?:\[\s*)?\{[^{]*?"name"\s*:\s*"([^"\\]*)"')
_TAGS = re.compile(
    rf"(<[^<>]*>)?\s*(<[^<>]*)?{_NAME}([^<]*)(<[^<]*){_KEY}(\S.*?)(\s*){_VALUE}(\s*)(</[^<>]*>)\s*(</[^<>]*>)", re.DOTALL
)
"""A call: its outer tag, what opens the name and ends it, what opens a key, what is between this and its value, and the closing tags."""
Call = dict[str, Any]
"""`{"type": "function", "function": {"name", "arguments"}}`, with `id` if written, or `{"error": text}` for what cannot be read."""
Tools = Mapping[str, object]
"""Of each tool, by its name, the JSON schema of its parameters."""


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls in JSON with a name and arguments."""

    arguments_key: str

    def read(self, text: str, tools: Tools) -> tuple[list[Call], str]:
        """The calls at the start of a text, and what follows: their own texts may contain the prefix."""
        try:
            found, end = json.JSONDecoder().raw_decode(text)
            _check_json(found)
        except (ValueError, RecursionError) as error:
            return [{"error": f"error: the tool call is not JSON: {error}"}], text
        return [self._call(one) for one in (found if isinstance(found, list) else [found])], text[end:]

    def _call(self, found: object) -> Call:
        name = found.get("name") if isinstance(found, dict) else None
        arguments = found.get(self.arguments_key, {}) if isinstance(found, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return {"error": f'error: a tool call is {{"name": TEXT, "{self.arguments_key}": OBJECT}}'}
        written = found.get("id") if isinstance(found, dict) else None
        function = {"name": name, "arguments": arguments}
        return {"type": "function", **({"id": written} if written and isinstance(written, str) else {}), "function": function}


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls in tags, as Qwen3-Coder's and GLM's. An argument is a text if its schema allows one, else JSON."""

    head: re.Pattern[str]
    """Up to the first argument; its group is the name."""
    argument: re.Pattern[str]
    """Its groups are name and value. One that never ends takes all that follows, without a value."""
    end: str
    example: str

    def read(self, text: str, tools: Tools) -> tuple[list[Call], str]:
        """As JsonCalls."""
        calls, end = list[Call](), 0
        while (head := self.head.match(text, end)) or not calls:
            arguments, end = dict[str, object](), head.end() if head else end
            while head and (found := self.argument.match(text, end)):
                arguments[found[1]] = _argument(found[2] or "", found[1], tools.get(head[1]))
                end = found.end()
            if head is None or not text.startswith(self.end, end):
                return [*calls, {"error": f"error: a tool call is {self.example}"}], text[end:]
            calls.append({"type": "function", "function": {"name": head[1], "arguments": arguments}})
            end += len(self.end)
        return calls, text[end:]


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """How a template writes a call: `prefix`, then the call."""

    prefix: str
    calls: JsonCalls | TaggedCalls

    def read(self, text: str, tools: Tools) -> tuple[str, list[Call]]:
        """Returns the text before the first call, and the calls. What a thought writes are none.

        Without a prefix, JSON that names none of the tools is an answer.
        """
        start, (thought, end, _) = self._start(text, 0), text.partition(_END_OF_THOUGHT)
        if end and not (0 <= start < len(thought) and self._takes_end(text[start + len(self.prefix) :], tools)):
            start = self._start(text, len(thought) + len(end))
        named = None if self.prefix else _NAMED.match(text, start)
        if start < 0 or (not self.prefix and (named is None or named[1] not in tools)):
            return text, []
        before, calls = text[:start].rstrip(), list[Call]()
        while start >= 0:
            more, text = self.calls.read(text[start + len(self.prefix) :].lstrip(), tools)
            calls += more
            start = text.find(self.prefix) if self.prefix else -1
        return before, calls

    def _start(self, text: str, begin: int) -> int:
        return text.find(self.prefix, begin) if self.prefix else len(text) - len(text[begin:].lstrip())

    def _takes_end(self, text: str, tools: Tools) -> bool:
        """Whether the end of a thought is in the call at the start of a text, as in an argument; not after it, nor before another call."""
        calls, rest = self.calls.read(text.lstrip(), tools)
        _, end, after = text[: len(text) - len(rest)].partition(_END_OF_THOUGHT)
        return bool(end) and not (self.prefix and self.prefix in after) and all("function" in call for call in calls)


def _check_json(value: object) -> None:
    """Raises ValueError for what Python reads, but JSON lacks: NaN, infinity and half a surrogate pair."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _within(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, Mapping) else None


def _kinds(schema: object, whole: object, seen: set[str]) -> list[object]:
    """JSON types that a schema names, also as alternatives; that of texts, if it names a text.

    whole: the schema that references lead into. seen: those followed so far.
    """
    if isinstance(reference := _within(schema, "$ref"), str):
        if reference in seen:
            return []
        seen.add(reference)
        return _kinds(reduce(_within, reference.split("/")[1:], whole), whole, seen)
    values = given if isinstance(given := _within(schema, "enum"), list) else [_within(schema, "const")]
    named = [kind for kind, one in (("string", str), ("null", type(None))) if any(isinstance(value, one) for value in values)]
    given = [named if "string" in named else None, *(_within(schema, key) for key in ("type", "anyOf", "oneOf", "allOf"))]
    inner = [one for each in given for one in (each if isinstance(each, list) else [each])]
    return [kind for one in inner if one is not None for kind in ([one] if isinstance(one, str) else _kinds(one, whole, seen))]


def _argument(text: str, name: str, parameters: object) -> object:
    kinds = _kinds(_within(_within(parameters, "properties"), name), parameters, set())
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))  # as some templates write them
        _check_json(value)
    except (ValueError, RecursionError):
        return text
    return value


def form_of(render: Callable[[Sequence[Message], bool], str]) -> ToolCallForm:
    """Finds the form from calls that the template writes itself, and that are read back.

    render: of messages, with the generation prompt or without. Raises InvalidArgument for calls that cannot be read.
    """

    def written(content: str, arguments: Mapping[str, Any], *, number: int = 1) -> str:
        call = {**_CALL, "function": {"name": _NAME, "arguments": arguments}}
        return render([_QUESTION, {"role": "assistant", "content": content, "tool_calls": [call] * number}], False)

    try:
        prompt, whole = render([_QUESTION], True), written("", {_KEY: _VALUE})
        shared = next((place for place, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
        # After the text, where nothing of a thought is in between; or alone, if the template drops the text, or writes it after the call.
        for answer in (written(_TEXT, {_KEY: _VALUE}).partition(_TEXT)[2], whole[shared:]):
            for form in _forms(answer):
                number = 1 if isinstance(form.calls, JsonCalls) else 2  # which some templates of JSON refuse
                _, calls = form.read(written("", _ODD, number=number)[shared:], _TOOLS)
                if [call.get("function") for call in calls] == [{"name": _NAME, "arguments": _ODD}] * number:
                    return form
    except InvalidArgument as error:
        raise InvalidArgument("tools", f"the model's chat template cannot write a tool call: {error.message}") from error
    problem = "the model's chat template writes tool calls in another form than JSON or tags, which tasuki cannot read"
    raise InvalidArgument("tools", f"{problem}; read them in the function")


def _forms(answer: str) -> Iterator[ToolCallForm]:
    for place, char in enumerate(answer):
        if char not in "{[":
            continue
        with suppress(ValueError, RecursionError):
            found, _ = json.JSONDecoder().raw_decode(answer, place)
            call: object = found[0] if isinstance(found, list) and found else found
            if isinstance(call, Mapping) and call.get("name") == _NAME:
                for key in (key for key, value in call.items() if value == {_KEY: _VALUE}):
                    yield ToolCallForm(answer[:place].strip(), JsonCalls(key))
    if tags := _TAGS.search(answer):
        outer, opens, named, key, value, before, after, close, end = (part or "" for part in tags.groups())
        first, last = rf"{_loose(key)}\s*", _loose(end)
        named = _loose(named) and rf"{_loose(named)}\s*"  # two `\s*` beside each other take quadratic time
        head = rf"\s*{_loose(opens)}" if outer and opens else ""
        head += rf"\s*([^\s<>\"]+)\s*{named}(?={first}|{last})"
        text = rf"(.*?)(?:{re.escape(after)})?{_loose(close)}\s*(?={first}|{last})"
        # Without an end, all is taken: each further call would search the rest again.
        argument = re.compile(rf"{first}([^\s<>\"]+)\s*{_loose(value)}(?:{re.escape(before)})?(?:{text}|.*)", re.DOTALL)
        example = tags[0].replace(_NAME, "NAME").replace(_KEY, "PARAMETER").replace(_VALUE, "VALUE")
        yield ToolCallForm(outer or opens, TaggedCalls(re.compile(head), argument, end, example))


def _loose(text: str) -> str:
    """A pattern of a text with any white space where it has some."""
    return r"\s*".join(map(re.escape, text.split()))
