"""OpenAI's chat completions as turns of an episode, and their answers. Pure."""

import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tasuki.wire.errors import InvalidArgument

MAX_CHOICES = 128
_SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "sampling_seed",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens", "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos",
}  # fmt: skip
"""Parameters of a request, and their names in SamplingParams."""
_READ = {
    *_SAMPLING, "messages", "tools", "tool_choice", "n", "stop", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "logprobs", "logit_bias", "response_format", "chat_template_kwargs",
}  # fmt: skip
_IGNORED = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
    "reasoning_effort", "verbosity", "skip_special_tokens", "spaces_between_special_tokens",
}  # fmt: skip
"""Parameters that change nothing here, or only advise."""
_ADVISED_CHOICES = ("required", "any")
"""What agents ask for by default, such as smolagents. Nothing forces a call: its tokens would not be the policy's own."""
_LOG_PROB = '{"token":"token_id:%d","logprob":%.9g,"bytes":null,"top_logprobs":[]}'
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
Answer = Mapping[str, Any]
"""What a turn answers, see `tasuki.client.episode.Asked.answered`."""


@dataclass(frozen=True, slots=True)
class Choices:
    """A turn that is asked for n times."""

    kind: str
    fields: Mapping[str, Any]
    number: int = 1

    @property
    def turns(self) -> list[Mapping[str, Any]]:
        """The fields of each; with a seed, each draws by the next one."""
        sampling = self.fields["sampling"]
        if type(seed := sampling.get("sampling_seed")) is not int:
            return [self.fields] * self.number
        return [{**self.fields, "sampling": {**sampling, "sampling_seed": seed + place}} for place in range(self.number)]


def read_chat(asked: Mapping[str, Any]) -> Choices:
    """Raises InvalidArgument naming a parameter that is wrong, or that nothing here follows."""
    choice, tools = asked.get("tool_choice"), asked.get("tools") or []
    if choice not in (None, "auto", "none") and not (tools and choice in _ADVISED_CHOICES):
        raise InvalidArgument("tool_choice", f'is {json.dumps(choice)}; give "auto" or "none", or "required" with tools')
    tools = [] if choice == "none" else tools
    options = asked.get("chat_template_kwargs") or {}
    fields = {
        "messages": read_messages(asked.get("messages")),
        "tools": tools,
        "variant": json.dumps([tools, options], sort_keys=True),
        "chat_template_kwargs": options,
    }
    return _choices("chat", asked, fields)


def read_generate(asked: Mapping[str, Any]) -> Choices:
    """The request of `/inference/v1/generate`: token ids and `sampling_params`. Raises InvalidArgument."""
    sampling, token_ids = asked.get("sampling_params") or {}, asked.get("token_ids")
    if not isinstance(sampling, dict):
        raise InvalidArgument("sampling_params", "is no object")
    if not isinstance(token_ids, list) or not token_ids or not all(type(one) is int and 0 <= one < 2**31 for one in token_ids):
        raise InvalidArgument("token_ids", "is no list of token ids")
    return _choices("generate", sampling, {"token_ids": token_ids})


def _choices(kind: str, asked: Mapping[str, Any], fields: Mapping[str, Any]) -> Choices:
    for name, value in asked.items():
        if value is not None and name not in _READ | _IGNORED:
            raise InvalidArgument(name, "is not supported; remove it")
    number = 1 if asked.get("n") is None else asked["n"]
    if type(number) is not int or not 1 <= number <= MAX_CHOICES:
        raise InvalidArgument("n", f"is {number!r}; give a whole number from 1 to {MAX_CHOICES}")
    sampling = {own: asked[name] for name, own in _SAMPLING.items() if asked.get(name) is not None}
    if asked.get("logit_bias"):
        try:
            sampling["logit_bias"] = {int(token_id): bias for token_id, bias in asked["logit_bias"].items()}
        except (AttributeError, ValueError):
            raise InvalidArgument("logit_bias", "is no object of numbers by token id") from None
    form = asked.get("response_format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_schema"):
        raise InvalidArgument("response_format", 'has another type than "text" and "json_schema"')
    if form["type"] == "json_schema":
        schema = form.get("json_schema")
        sampling["json_schema"] = schema.get("schema") if isinstance(schema, dict) else None
        if not isinstance(sampling["json_schema"], dict):
            raise InvalidArgument("response_format", "has no json_schema.schema")
    stop = asked.get("stop") or []
    limits = (asked.get("max_completion_tokens"), asked.get("max_tokens"))
    limit = next((one for one in limits if one is not None), None)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidArgument("max_tokens", f"is {limit!r}; give a whole number of at least 1")
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise InvalidArgument("stop", "is no text or list of texts")
    return Choices(kind, {**fields, "sampling": sampling, "stop": stop, "max_new_tokens": limit}, number)


def read_messages(given: object) -> list[dict[str, Any]]:
    """OpenAI's messages in the form of chat templates: text, arguments as objects, results in the order of their calls."""
    if not isinstance(given, list) or not given:
        raise InvalidArgument("messages", "is no list of messages")
    ordered: list[tuple[tuple[int, float], dict[str, Any]]] = []
    calls: dict[object, tuple[float, str]] = {}
    last = 0
    for index, message in enumerate(given):
        role = _ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
        if role is None:
            raise InvalidArgument("messages", f"message {index} is no object with a role of {', '.join(_ROLES)}")
        read: dict[str, Any] = {"role": role, "content": _content(message.get("content"), index)}
        place = -1.0
        if role == "tool":
            call_id = message.get("tool_call_id")
            place, name = calls.get(call_id if isinstance(call_id, str) else "", (math.inf, ""))
            read |= {key: value for key, value in (("name", name), ("tool_call_id", call_id)) if value}
        else:
            last, calls = index, {}
        if role == "assistant" and message.get("tool_calls"):
            read["tool_calls"] = _calls(message["tool_calls"], index, calls)
        ordered.append(((last, place), read))
    return [message for _, message in sorted(ordered, key=lambda one: one[0])]


def _content(content: object, index: int) -> str | list[dict[str, str]]:
    """A text; a list of parts if it has images."""
    if content is None or content == []:
        return ""
    if isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for part in _listed(content):
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:") and ";base64," in url[:64]:
                parts.append({"type": "image", "bytes": url.partition(",")[2]})
            case {"type": "image_url"}:
                problem = (
                    "has an image without a `url` that begins as data:image/png;base64, - nothing is fetched: send the file"
                )
                raise InvalidArgument("messages", f"message {index} {problem}")
            case _:
                parts.clear()
                break
    if not parts:
        raise InvalidArgument("messages", f"message {index} has content that is no text, and no list of texts and images")
    return parts if any("bytes" in part for part in parts) else "\n".join(part["text"] for part in parts)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _calls(given: object, index: int, calls: dict[object, tuple[float, str]]) -> list[dict[str, Any]]:
    """calls: gets the place and name of each call by its id."""
    found: list[dict[str, Any]] = []
    for place, call in enumerate(_listed(given)):
        function = call.get("function") if isinstance(call, dict) else None
        try:
            arguments = function["arguments"] if isinstance(function, dict) else None
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (KeyError, ValueError, RecursionError):
            arguments = None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            problem = f"message {index}: tool call {place} is no function with a name and with arguments that are a JSON object"
            raise InvalidArgument("messages", problem)
        one = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            calls[call["id"]] = float(place), function["name"]
            one["id"] = call["id"]
        found.append(one)
    return found


def completion(answers: Sequence[Answer], *, model: str, has_log_probs: bool) -> dict[str, Any]:
    """The answers as one `chat.completion`."""
    choices = [_choice(index, answer, has_log_probs=has_log_probs) for index, answer in enumerate(answers)]
    prompt_tokens = answers[0]["num_prompt_tokens"]
    drawn = sum(len(answer["token_ids"]) for answer in answers)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn}
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**head, "choices": choices, "usage": usage}


def generated(answers: Sequence[Answer]) -> str:
    """The answers as `/inference/v1/generate` gives them, as JSON."""
    choices = [
        f'{{"index":{index},"token_ids":{answer["token_ids"]},"finish_reason":"{_finish_reason(answer)}","logprobs":{_log_probs(answer)}}}'
        for index, answer in enumerate(answers)
    ]
    return f'{{"request_id":"generate-{secrets.token_hex(12)}","choices":[{",".join(choices)}]}}'


def _choice(index: int, answer: Answer, *, has_log_probs: bool) -> dict[str, Any]:
    shown = answer["shown"]
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)},
        }
        for call in shown.get("tool_calls", ())
    ]
    message = {"role": "assistant", "content": None if calls and not shown["content"] else shown["content"]}
    return {
        "index": index,
        "message": {**message, "tool_calls": calls} if calls else message,
        "finish_reason": "tool_calls" if calls else _finish_reason(answer),
        "stop_reason": answer.get("stop"),
        "logprobs": json.loads(_log_probs(answer)) if has_log_probs else None,
    }


def _finish_reason(answer: Answer) -> str:
    return "stop" if answer["finish_reason"] == "stop" else "length"


def _log_probs(answer: Answer) -> str:
    """As JSON, with the nine digits that a float32 has. Formatted at once: token by token it would cost more than all else."""
    pairs = zip(answer["token_ids"], answer["log_probs"], strict=True)
    content = ",".join([_LOG_PROB] * len(answer["token_ids"])) % tuple(chain.from_iterable(pairs))
    return f'{{"content":[{content}]}}'


def chunks(answer: Mapping[str, Any], *, has_usage: bool) -> Iterator[str]:
    """A complete answer as server-sent events."""
    head = {**answer, "object": "chat.completion.chunk"}
    usage, choices = head.pop("usage"), head.pop("choices")
    for choice in choices:
        message = dict(choice["message"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        for delta, reason, log_probs in ((message, None, choice["logprobs"]), ({}, choice["finish_reason"], None)):
            part = {"index": choice["index"], "delta": delta, "finish_reason": reason, "logprobs": log_probs}
            yield f"data: {json.dumps({**head, 'choices': [part]})}\n\n"
    if has_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"
