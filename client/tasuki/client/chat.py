"""Chats as token ids, and which of them the assistant wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tasuki.wire.errors import InvalidArgument

Message = Mapping[str, object]
"""`role`, `content`, and what else the chat template reads."""
Render = Callable[[Sequence[Message]], list[int]]
"""Token ids of messages by a chat template."""
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A conversation as a model reads it."""

    token_ids: list[int]
    """[T]"""
    assistant_mask: list[int]
    """[T], 1 for what the assistant wrote, end-of-turn token included, else 0."""


def chat_tokens(messages: Sequence[Message], *, render: Render, render_prompt: Render, eos_token_id: int | None) -> ChatTokens:
    """Tells the assistant's tokens apart by rendering the conversation up to each of its turns.

    render_prompt: with what begins the assistant's answer behind the messages.
    A turn begins where the prompt for it ends, and ends with its last `eos_token_id`, or with the turn when it has none.
    Raises InvalidArgument when the template does not render the beginning of a conversation as the beginning of the whole.
    """
    token_ids = render(messages)
    assistant_mask = [0] * len(token_ids)
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        prompt = render_prompt(messages[:index])
        turn = token_ids if index == len(messages) - 1 else render(messages[: index + 1])
        for shorter, longer in pairwise((prompt, turn, token_ids)):
            if longer[: len(shorter)] != shorter:
                raise InvalidArgument("messages", _no_prefix(index, is_prompt=shorter is prompt))
        end = len(turn)
        if eos_token_id in turn[len(prompt) :]:
            end -= turn[::-1].index(eos_token_id)
        assistant_mask[len(prompt) : end] = [1] * (end - len(prompt))
    return ChatTokens(token_ids, assistant_mask)


def _no_prefix(index: int, *, is_prompt: bool) -> str:
    if is_prompt:
        cause = f"the prompt for message {index} is not how the conversation with that message begins"
        cure = "remove white space around its content"
    else:
        cause = f"the conversation up to message {index} is rendered otherwise when more messages follow"
        cure = "give each answer its own row, as the last message"
    return f"the assistant's tokens cannot be told apart: by the chat template, {cause}; {cure}, or mark them with {{% generation %}}"
