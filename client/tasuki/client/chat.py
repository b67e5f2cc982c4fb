"""Chats as token ids, with a mask of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tasuki.wire.errors import InvalidArgument

Message = Mapping[str, object]
"""`role`, `content`, and anything else the chat template reads."""
Render = Callable[[Sequence[Message]], list[int]]
"""Renders messages to token ids with a chat template."""
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A conversation as token ids with a loss mask."""

    token_ids: list[int]
    """[T]"""
    assistant_mask: list[int]
    """[T], 1 for the assistant's tokens including the end of turn, else 0."""


def chat_tokens(messages: Sequence[Message], *, render: Render, render_prompt: Render, eos_token_id: int | None) -> ChatTokens:
    """Finds the assistant's tokens by rendering the conversation up to each of its turns.

    render_prompt: like render, with the generation prompt appended.
    A turn starts where its prompt ends. It ends with its last `eos_token_id`, or at its last token without one.
    Raises InvalidArgument if rendering part of a conversation is not a prefix of rendering the whole.
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
        cause = f"the prompt of message {index} is not a prefix of the conversation with that message"
        cure = "remove white space around its content"
    else:
        cause = f"the conversation up to message {index} is rendered differently when more messages follow"
        cure = "put each answer in its own row, as the last message"
    return f"cannot find the assistant's tokens: with this chat template, {cause}; {cure}, or mark them with {{% generation %}}"
