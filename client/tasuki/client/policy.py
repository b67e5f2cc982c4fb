"""What the function of an episode is given: the policy, chats with it, and tools that the policy may call."""

import asyncio
import inspect
import json
import operator
import re
import threading
import types
import typing
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasuki.client.reward_worker import LARGEST_REWARD, checked_reward, told

Message = dict[str, Any]
Tool = Callable[..., object]
Ask = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
_MAX_RESULT_CHARACTERS = 100_000
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy wrote in one turn."""

    text: str
    """Without special tokens and tool calls."""
    token_ids: list[int]
    """As drawn, with the stop token. Empty if the episode has no room or no turn left: `finish_reason` is then "length"."""
    log_probs: list[float]
    """Of `token_ids`, natural logarithms."""
    context: list[int]
    """The turn's prompt and `token_ids`: what a prompt of the next turn begins with, if it is given in token ids."""
    finish_reason: str
    """"stop", "length" or "cut"."""
    tool_calls: list[dict[str, Any]]
    """Calls of tools, as chat templates take them; `error` instead of `function` for one that cannot be read."""
    message: Message
    """The assistant's message for a chat: append it as it is, and the next turn extends this one."""


class Policy:
    """The model that learns. Calls of one episode may run at once."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._latest_turn: int | None = None
        self.turn_rewards: dict[int, float] = {}
        """By the number of the turn; empty if none was rewarded."""

    def reward(self, value: float) -> None:
        """Adds to the reward of the turn whose answer came last. What the function returns is added to the last turn's.

        That of an answer without room is of the turn before it, or of the first one.
        Raises ValueError before the first answer, and for a value that no reward may have.
        """
        number, problem = checked_reward(value)
        if problem or self._latest_turn is None:
            cure = f"give a number of at most {LARGEST_REWARD:g}" if problem else "call it after a turn of the policy"
            raise ValueError(f"policy.reward({value!r}): {cure}")
        self.turn_rewards[self._latest_turn] = self.turn_rewards.get(self._latest_turn, 0.0) + number

    async def _turn(self, kind: str, fields: Mapping[str, Any]) -> Reply:
        answer = await self.ask(kind, fields)
        return Reply(**{name: answer[name] for name in Reply.__slots__})

    async def ask(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Asks for a turn, or an encoding, in the form of `episode.Asked`."""
        answer = await self._ask(kind, fields)
        self._latest_turn = answer.get("turn", self._latest_turn or 0)  # one that was refused, for want of room, has none
        return answer

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text by the model's tokenizer, without the tokens that begin a sequence."""
        return (await self._ask("encode", {"text": text}))["token_ids"]

    async def generate(self, token_ids: Sequence[int], *, max_new_tokens: int | None = None) -> Reply:
        """Continues a prompt of token ids. A prompt that begins with an earlier turn's tokens extends it; any other begins a branch."""
        given = [operator.index(token_id) for token_id in token_ids]
        return await self._turn("generate", {"token_ids": given, "max_new_tokens": max_new_tokens})

    async def chat_completion(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, max_new_tokens: int | None = None
    ) -> Reply:
        """Answers a chat by the model's chat template. tools: JSON schemas, of the first turn of a chat.

        Messages that begin with an earlier turn's, its answer included, extend its tokens; any others begin a branch.
        """
        fields = {"messages": list(messages), "tools": list(tools), "max_new_tokens": max_new_tokens}
        return await self._turn("chat", fields)

    def chat(self, messages: Sequence[Message] = (), *, tools: Sequence[Tool] = ()) -> "Chat":
        """A conversation that begins with `messages`, such as a system prompt. tools: Python functions with a docstring."""
        names = [getattr(tool, "__name__", "") for tool in tools]
        if not all(names) or len(set(names)) < len(names):
            raise TypeError(f"tools {names} need names that differ: give functions, no partials or objects")
        return Chat(self, list(messages), dict(zip(names, tools, strict=True)))


class Chat:
    """A conversation with the policy, which keeps its messages."""

    def __init__(self, policy: Policy, messages: list[Message], tools: Mapping[str, Tool]) -> None:
        self.messages = messages
        self._policy, self._tools = policy, tools
        self._schemas = [tool_schema(tool) for tool in tools.values()]

    async def say(self, content: str, *, images: Sequence[bytes] = (), max_new_tokens: int | None = None) -> Reply:
        """Adds a user's message. Runs the tools that the policy calls until it answers without one, or the episode has no turn left.

        images: PNG, JPEG or WebP files, shown before `content`.
        """
        parts = [*map(_image_part, images), {"type": "text", "text": content}]
        self.messages.append({"role": "user", "content": parts if images else content})
        while True:
            reply = await self._policy.chat_completion(self.messages, self._schemas, max_new_tokens=max_new_tokens)
            if reply.token_ids:
                self.messages.append(reply.message)
            if not reply.tool_calls or not self._tools:
                return reply
            for call in sorted(reply.tool_calls, key=lambda call: "error" in call):  # the message has no unreadable calls
                if "error" in call:
                    self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": call["error"]})
                else:
                    result = await self._run(**call["function"])
                    known = {"name": call["function"]["name"], "tool_call_id": call["id"]}
                    self.messages.append({"role": "tool", **known, "content": result})

    async def _run(self, name: str, arguments: dict[str, Any]) -> str | list[dict[str, str]]:
        """The tool's result as text, or as an image if it is bytes. What it raises is told to the policy, whose call may be at fault."""
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}; there are {', '.join(self._tools)}"
        try:
            inspect.signature(tool).bind(**arguments)
            if inspect.iscoroutinefunction(tool):
                result, problem = await tool(**arguments), ""
            else:
                result, problem = await _in_thread(tool, arguments)
            if isinstance(result, bytes):
                return [_image_part(result)]
            text = f"error: {problem}" if problem else result if isinstance(result, str) else json.dumps(result)
        except Exception as error:  # noqa: BLE001  the user's tool may raise anything
            text = f"error: {_told(error)}"
        return text[:_MAX_RESULT_CHARACTERS].encode(errors="backslashreplace").decode()  # names of files have lone surrogates


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  so may its own text
        return told(error)


def _image_part(file: bytes) -> dict[str, str]:
    return {"type": "image", "bytes": b64encode(file).decode()}


async def _in_thread(tool: Tool, arguments: Mapping[str, Any]) -> tuple[object, str]:
    """Calls a tool in a thread of its own: one that hangs takes none from others. Returns its result, and what it has raised as text."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[object, str]] = loop.create_future()

    def end(result: object, problem: str) -> None:
        if not done.done():
            done.set_result((result, problem))

    def work() -> None:
        try:
            result, problem = tool(**arguments), ""
        except BaseException as error:  # noqa: BLE001  the user's tool may raise anything
            result, problem = None, _told(error)
        loop.call_soon_threadsafe(end, result, problem)

    threading.Thread(target=work, daemon=True).start()
    return await done


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a function, as chat templates take it: from its signature and docstring.

    Lines `name: text` of the docstring describe parameters. Raises TypeError naming a parameter without a type that JSON has.
    """
    hints = typing.get_type_hints(tool)
    text = inspect.getdoc(tool) or ""
    if not text:
        raise TypeError(f"tool {tool.__name__} has no docstring, from which the policy learns what it does")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {tool.__name__}: parameter `{parameter}` has no JSON schema; name each parameter")
        told = re.search(rf"^\s*{name}\s*(?:\([^)]*\))?:\s*(.+)$", text, re.MULTILINE)
        try:
            properties[name] = _json_type(hints[name]) | ({"description": told[1].strip()} if told else {})
        except KeyError:
            problem = f"tool {tool.__name__}: parameter `{name}` needs a type: str, int, float, bool, list, dict or a Literal"
            raise TypeError(problem) from None
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    about = text.split("\n\n")[0].replace("\n", " ")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": tool.__name__, "description": about, "parameters": parameters}}


def _json_type(hint: Any) -> dict[str, Any]:
    """Raises KeyError for a type that JSON lacks."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"type": _JSON_TYPES[type(inner[0])], "enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        (kept,) = [one for one in inner if one is not type(None)] if len(inner) == 2 else [None]
        return _json_type(kept)
    if origin is list and inner:
        return {"type": "array", "items": _json_type(inner[0])}
    return {"type": _JSON_TYPES[origin or hint]}
