"""Anthropic's Messages in the form of OpenAI's chat completions, and answers back. Pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tasuki.wire.errors import InvalidArgument

_TAKEN = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
}
_READ = {*_TAKEN, "model", "messages", "system", "tools", "tool_choice", "stream"}
_IGNORED = {"metadata", "service_tier", "cache_control", "thinking", "output_config", "speed", "inference_geo"}
"""Parameters that change nothing here, or only advise."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def as_chat_request(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Raises InvalidArgument naming a parameter that is wrong, or that nothing here follows."""
    for name, value in asked.items():
        if value is not None and name not in _READ | _IGNORED:
            raise InvalidArgument(name, "is not supported; remove it")
    messages = [] if asked.get("system") is None else [{"role": "system", "content": asked["system"]}]
    given, tools = asked.get("messages"), asked.get("tools") or []
    if not isinstance(given, list) or not given:
        raise InvalidArgument("messages", "is no list of messages")
    if not isinstance(tools, list):
        raise InvalidArgument("tools", "is no list of tools")
    for index, message in enumerate(given):
        messages += _messages(message, index)
    if isinstance(given[-1], dict) and given[-1].get("role") == "assistant":
        raise InvalidArgument("messages", "end with the assistant's, which cannot be continued; end with the user's")
    choice = asked.get("tool_choice")
    return {
        **{own: asked[name] for name, own in _TAKEN.items() if asked.get(name) is not None},
        "messages": messages,
        "tools": [_tool(tool) for tool in tools],
        "tool_choice": choice.get("type") if isinstance(choice, dict) else choice,
    }


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise InvalidArgument("tools", "has one without `name` and `input_schema`")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: object, index: int) -> Iterator[dict[str, Any]]:
    """The results of tools in a message, each as one of its own, and what is left."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, list):
        yield message if isinstance(message, dict) else {"role": None}
        return
    texts, calls, has_results = [], [], False
    for block in content:
        match block:
            case {"type": "text" | "image"}:
                texts.append(_part(block))
            case {"type": "tool_use"}:
                calls.append({"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}})
            case {"type": "tool_result"}:
                has_results = True
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _parts(block.get("content"))}
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                problem = "has a block that is no text, image, tool_use or tool_result"
                raise InvalidArgument("messages", f"message {index} {problem}")
    if texts or calls or not has_results:
        yield {"role": message.get("role"), "content": texts or None, "tool_calls": calls}


def _parts(content: Any) -> Any:
    return list(map(_part, content)) if isinstance(content, list) else content


def _part(block: Any) -> Any:
    """A block of text or an image as a part of OpenAI's; an image that is no file in base64 has no URL."""
    match block:
        case {"type": "text"}:
            return {"type": "text", "text": block.get("text")}
        case {"type": "image", "source": {"type": "base64", "data": str(content)}}:
            return {"type": "image_url", "image_url": {"url": f"data:;base64,{content}"}}
        case {"type": "image"}:
            return {"type": "image_url"}
    return block


def as_message(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The `message` of a `chat.completion`."""
    (choice,), usage = completion["choices"], completion["usage"]
    content: list[dict[str, Any]] = []
    is_stopped = choice["finish_reason"] == "stop" and choice["stop_reason"] is not None
    if choice["message"]["content"]:
        content.append({"type": "text", "text": choice["message"]["content"]})
    for call in choice["message"].get("tool_calls", ()):
        function = call["function"]
        content.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        )
    return {
        "id": completion["id"].replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": "stop_sequence" if is_stopped else _REASONS[choice["finish_reason"]],
        "stop_sequence": choice["stop_reason"] if is_stopped else None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def events(message: Mapping[str, Any]) -> Iterator[str]:
    """A complete message as server-sent events."""
    yield _event("message_start", message={**message, "content": [], "stop_reason": None, "stop_sequence": None})
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            begun, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            begun, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=index, content_block=begun)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield _event("message_delta", delta=ended, usage=message["usage"])
    yield _event("message_stop")


def _event(kind: str, **fields: object) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
