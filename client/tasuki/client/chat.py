"""Chats as token ids, with a mask of the assistant's tokens."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasuki.client.dataset import Row
from tasuki.wire.errors import InvalidArgument

Message = Mapping[str, object]
"""`role`, `content`, and anything else the chat template reads. A `weight` of 0 leaves an answer untrained."""
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


class Tokenizer(Protocol):
    """The tokenizer of a run: `tasuki.runs.tokenizer.ModelTokenizer`. fields: the row, whose `tools` and `chat_template_kwargs` reach the
    chat template. Each method raises InvalidArgument for input of no use.
    """

    def encode_text(self, text: str) -> list[int]: ...
    def encode_prompt(self, prompt: object, fields: Row | None = None) -> list[int]: ...
    def encode_next(self, messages: Sequence[Message], place: int, fields: Row, *, last_token_id: int | None) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Message], fields: Row | None = None) -> ChatTokens: ...
    def encode_example(self, prompt: str, completion: str, fields: Row | None = None) -> ChatTokens:
        """Encodes both as one text with an end-of-sequence token; a token that spans them belongs to the completion."""
        ...

    def num_image_tokens(self, images: Sequence[bytes]) -> int: ...
    def tool_call_form(self, fields: Row) -> object: ...
    def read_answer(self, token_ids: Sequence[int], fields: Row) -> dict[str, Any]: ...
    def decode(self, token_ids: NDArray[np.int32]) -> str: ...
    def decode_whole(self, token_ids: NDArray[np.int32]) -> str:
        """With special tokens."""
        ...


def is_learned(message: Message) -> bool:
    return message["role"] == ASSISTANT and message.get("weight") != 0


def chat_tokens(
    messages: Sequence[Message], *, render: Render, render_prompt: Render, stop_token_ids: Collection[int]
) -> ChatTokens:
    """Finds the assistant's tokens by rendering the conversation up to each of its turns.

    render_prompt: like render, with the generation prompt appended.
    A turn starts where its prompt ends. It ends with its last stop token, or else with one that begins the next message, as GLM's.
    Raises InvalidArgument if rendering part of a conversation is not a prefix of rendering the whole.
    """
    token_ids = render(messages)
    assistant_mask = [0] * len(token_ids)
    for index, message in enumerate(messages):
        if not is_learned(message):
            continue
        prompt = render_prompt(messages[:index])
        turn = token_ids if index == len(messages) - 1 else render(messages[: index + 1])
        for shorter, longer in pairwise((prompt, turn, token_ids)):
            if longer[: len(shorter)] != shorter:
                raise InvalidArgument("messages", _no_prefix(index, is_prompt=shorter is prompt))
        stops = [place for place in range(len(prompt), len(turn)) if turn[place] in stop_token_ids]
        end = stops[-1] + 1 if stops else len(turn) + any(one in stop_token_ids for one in token_ids[len(turn) :][:1])
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
