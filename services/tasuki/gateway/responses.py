"""OpenAI's Responses in the form of chat completions, and answers back. Pure."""

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from tasuki.wire.errors import InvalidArgument

_TAKEN = {"max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "tool_choice": "tool_choice"}
_READ = {*_TAKEN, "input", "instructions", "tools", "text", "stream"}
_IGNORED = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "reasoning",
    "include", "truncation", "stream_options",
}  # fmt: skip
"""Parameters that change nothing here, or only advise."""
_TOOL = ("name", "description", "parameters")
_TEXTS = ("input_text", "output_text", "text")


def as_chat_request(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Raises InvalidArgument naming a parameter that is wrong, or that nothing here follows."""
    for name, value in asked.items():
        if value not in (None, False) and name not in _READ | _IGNORED:
            raise InvalidArgument(name, "is not supported; remove it, and send the whole conversation as `input`")
    given, tools, text = asked.get("input"), asked.get("tools") or [], asked.get("text") or {}
    given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    form = (text.get("format") or {"type": "text"}) if isinstance(text, dict) else None
    if not isinstance(given, list) or not given:
        raise InvalidArgument("input", "is no text, and no list of items")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool.get("type") == "function" for tool in tools):
        raise InvalidArgument("tools", "is no list of tools of type function")
    if not isinstance(form, dict):
        raise InvalidArgument("text", "is no object with a `format`")
    first = [] if asked.get("instructions") is None else [{"role": "system", "content": asked["instructions"]}]
    return {
        **{own: asked[name] for name, own in _TAKEN.items() if asked.get(name) is not None},
        "messages": [*first, *_messages(given)],
        "tools": [{"type": "function", "function": {name: tool[name] for name in _TOOL if tool.get(name)}} for tool in tools],
        "response_format": {"type": form.get("type"), "json_schema": form},
    }


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Calls belong to the message of the assistant before them: one answer gave both."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        match kind:
            case "message":
                messages.append({"role": item.get("role"), "content": _parts(item.get("content"))})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _parts(item.get("output"))})
            case "reasoning":
                pass
            case _:
                raise InvalidArgument("input", f"item {index} is no message, function_call or function_call_output")
    return messages


def _parts(content: Any) -> Any:
    return list(map(_part, content)) if isinstance(content, list) else content


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    return {**part, "type": "text"} if kind in _TEXTS else part


def as_response(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The `response` of a `chat.completion`."""
    (choice,), usage = completion["choices"], completion["usage"]
    message, is_cut = choice["message"], choice["finish_reason"] == "length"
    output: list[dict[str, Any]] = []
    if message["content"] or not message.get("tool_calls"):
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        output.append({"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed", "content": [part]})
    output += [
        {"type": "function_call", "id": _id("fc"), "call_id": call["id"], **call["function"], "status": "completed"}
        for call in message.get("tool_calls", ())
    ]
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": completion["created"],
        "model": completion["model"],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": output,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def events(response: Mapping[str, Any]) -> Iterator[str]:
    """A complete response as server-sent events."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    first, last = (
        {"type": "response.created", "response": begun},
        {"type": f"response.{response['status']}", "response": response},
    )
    for number, fields in enumerate((first, *_items(response["output"]), last)):
        yield f"event: {fields['type']}\ndata: {json.dumps({**fields, 'sequence_number': number})}\n\n"


def _items(output: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for index, item in enumerate(output):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,), text = item["content"], {**at, "content_index": 0}
            yield {"type": "response.output_item.added", **at, "item": {**item, "status": "in_progress", "content": []}}
            yield {"type": "response.content_part.added", **text, "part": {**part, "text": ""}}
            yield {"type": "response.output_text.delta", **text, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **text, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **text, "part": part}
        else:
            yield {"type": "response.output_item.added", **at, "item": {**item, "status": "in_progress", "arguments": ""}}
            yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.output_item.done", **at, "item": item}
