"""Reads tool calls in the form in which a model's own chat template writes them."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasuki.models.chat_template import Message
from tasuki.wire.errors import InvalidArgument

_NAME, _KEY, _VALUE = "tool_name", "argument_name", "argument_value"
_TEXT = "written beside the call"
_CALL = {"type": "function", "id": "000000000"}
_ODD = {"text": '"q"\n{[é]}', "number": -1.5, "list": [{"key": None}]}
_QUESTION: Message = {"role": "user", "content": "question"}
_END_OF_THOUGHT = "</think>"
_NAMED = re.compile(r'\s*(?:\[\s*)?\{[^{]*?"name"\s*:\s*"([^"\\]*)"')
Call = dict[str, Any]
"""`{"type": "function", "function": {"name", "arguments"}}`, with `id` if written, or `{"error": text}` for what cannot be read."""


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """How a template writes a call: `prefix`, then JSON with a name and arguments."""

    prefix: str
    arguments_key: str

    def read(self, text: str, names: Collection[str]) -> tuple[str, list[Call]]:
        """Returns the text before the first call, and the calls. What a thought writes are none.

        names: of the tools. Without a prefix, JSON that names none of them is an answer.
        """
        begin = text.find(_END_OF_THOUGHT) + len(_END_OF_THOUGHT) if _END_OF_THOUGHT in text else 0
        start = text.find(self.prefix, begin) if self.prefix else len(text) - len(text[begin:].lstrip())
        named = None if self.prefix else _NAMED.match(text, start)
        if start < 0 or (not self.prefix and (named is None or named[1] not in names)):
            return text, []
        before, calls = text[:start].rstrip(), list[Call]()
        while start >= 0:
            more, text = self._calls(text[start + len(self.prefix) :].lstrip())
            calls += more
            start = text.find(self.prefix) if self.prefix else -1
        return before, calls

    def _calls(self, text: str) -> tuple[list[Call], str]:
        """The calls at the start of a text, and what follows: their own texts may contain the prefix."""
        try:
            found, end = json.JSONDecoder().raw_decode(text)
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # Python also reads NaN and half a surrogate pair
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


def form_of(render: Callable[[Sequence[Message], bool], str]) -> ToolCallForm:
    """Finds the form from calls that the template writes itself, and that are read back.

    render: of messages, with the generation prompt or without. Raises InvalidArgument for calls that cannot be read.
    """

    def written(content: str, arguments: Mapping[str, Any]) -> str:
        call = {**_CALL, "function": {"name": _NAME, "arguments": arguments}}
        return render([_QUESTION, {"role": "assistant", "content": content, "tool_calls": [call]}], False)

    try:
        prompt, whole = render([_QUESTION], True), written("", {_KEY: _VALUE})
        shared = next((place for place, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
        # After the text, where nothing of a thought is in between; or alone, if the template drops the text, or writes it after the call.
        for answer in (written(_TEXT, {_KEY: _VALUE}).partition(_TEXT)[2], whole[shared:]):
            for place, char in enumerate(answer):
                if char in "{[" and (form := _form(answer, place)) is not None:
                    _, calls = form.read(written("", _ODD)[shared:], [_NAME])
                    if [call.get("function") for call in calls] == [{"name": _NAME, "arguments": _ODD}]:
                        return form
    except InvalidArgument as error:
        raise InvalidArgument("tools", f"the model's chat template cannot write a tool call: {error.message}") from error
    problem = "the model's chat template writes tool calls in another form than JSON, which tasuki cannot read; read them in the function"
    raise InvalidArgument("tools", problem)


def _form(answer: str, place: int) -> ToolCallForm | None:
    try:
        found, _ = json.JSONDecoder().raw_decode(answer, place)
    except (ValueError, RecursionError):
        return None
    call: object = found[0] if isinstance(found, list) and found else found
    if not isinstance(call, Mapping) or call.get("name") != _NAME:
        return None
    keys = [key for key, value in call.items() if value == {_KEY: _VALUE}]
    return ToolCallForm(answer[:place].strip(), keys[0]) if keys else None
