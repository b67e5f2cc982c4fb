"""Supervised data from a JSONL file: conversations, or prompts with completions, as samples with a loss mask."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tasuki.client.chat import ASSISTANT, ChatTokens, Tokenizer, is_learned
from tasuki.client.dataset import CHAT_AS_TEXT, Row, is_chat_as_text, other_columns, prompt_problem, read_objects
from tasuki.client.images import ImageFiles, with_whole_paths
from tasuki.client.types import TrainingSample
from tasuki.wire.errors import InvalidArgument

# What other programs call a row's loss mask, and its tokens.
_MASKS = (
    "weight", "weights", "loss", "loss_mask", "loss_weight", "loss_weights", "sample_weight", "mask", "train", "labels", "attention_mask",
    "completion_mask", "assistant_mask", "assistant_masks", "input_ids", "token_ids", "tokens", "position_ids",
)  # fmt: skip


def read_sft_jsonl(
    path: Path | str, tokenizer: Tokenizer, *, max_tokens: int, columns: Mapping[str, str] | None = None
) -> list[TrainingSample]:
    """Reads one sample per row; files and `columns` are those of `read_objects`. A row has one of

    - `messages`, a chat. The assistant's messages are trained, except those with `weight` 0; everything before the first is the prompt.
    - `prompt` and `completion`, two strings. The completion and an end-of-sequence token are trained.
    - `prompt`, a list of chat messages, and `completion`, the assistant's answer as a string, which ends the chat and alone is trained.

    max_tokens: of prompt plus completion.
    Raises PathNotFound without a file, InvalidArgument naming file and line for an unusable line.
    """
    samples: list[TrainingSample] = []
    for place, row in read_objects(path, columns=columns):
        try:
            sample = sft_sample(row, tokenizer, folder=Path(path).parent)
            num_image_tokens = tokenizer.num_image_tokens(sample.images)
        except InvalidArgument as error:
            raise InvalidArgument("dataset", f"{place}: {error.message}", place=place) from error
        num_tokens = len(sample.prompt_token_ids) + len(sample.completion_token_ids) + num_image_tokens
        if num_tokens > max_tokens:
            problem = f"{place}: has {num_tokens} tokens; at most {max_tokens} fit; shorten or remove it"
            raise InvalidArgument("dataset", problem, place=place, num_tokens=num_tokens)
        samples.append(sample)
    return samples


def sft_sample(row: Row, tokenizer: Tokenizer, *, folder: Path = Path()) -> TrainingSample:
    """Builds the sample of one row, with a loss mask of 1 for trained tokens. Raises InvalidArgument naming the field.

    folder: in which relative paths of images begin.
    """
    if masks := [name for name in _MASKS if row.get(name) is not None]:
        raise InvalidArgument(masks[0], "is not read from a row; give texts, and answers that are not learned `weight` 0")
    if "messages" in row:
        if "prompt" in row or "completion" in row:
            raise InvalidArgument("messages", "comes with `prompt` or `completion`; give one or the other")
        return _chat_sample(row["messages"], row, tokenizer, folder)
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None or completion is None:
        raise InvalidArgument(
            "messages", f"missing; give `messages`, or `prompt` and `completion`; the row {other_columns(row)}"
        )
    if problem := prompt_problem(prompt):
        raise InvalidArgument("prompt", problem)
    if not isinstance(completion, str) or not completion:
        raise InvalidArgument("completion", f"must be a string with text, is {completion!r:.40}")
    if is_chat_as_text(completion):
        raise InvalidArgument("completion", CHAT_AS_TEXT)
    if isinstance(prompt, list):
        if weighted := [index for index, message in enumerate(prompt) if message.get("weight")]:
            raise InvalidArgument(
                "prompt", f"message {weighted[0]} has a weight, but only the completion is trained; remove it"
            )
        given = [{**message, "weight": 0} if message["role"] == ASSISTANT else message for message in prompt]
        return _chat_sample([*given, {"role": ASSISTANT, "content": completion}], row, tokenizer, folder)
    return _sample(tokenizer.encode_example(str(prompt), completion, row))


def _chat_sample(messages: object, row: Row, tokenizer: Tokenizer, folder: Path) -> TrainingSample:
    """The prompt ends with the template's generation prompt for the first answer. Everything after the last answer is dropped."""
    if not isinstance(messages, list):
        raise InvalidArgument("messages", f"must be a list of chat messages, is {type(messages).__name__}")
    tokens = tokenizer.encode_chat(messages, row)
    last = max((index for index, message in enumerate(messages) if is_learned(message)), default=-1)
    return _sample(tokens, images=ImageFiles(with_whole_paths(messages[: last + 1], folder=folder), field="messages"))


def _sample(tokens: ChatTokens, *, images: Sequence[bytes] = ()) -> TrainingSample:
    learned = np.flatnonzero(tokens.assistant_mask)
    if not len(learned):
        raise InvalidArgument("messages", "has no tokens by the assistant, so there is nothing to train on")
    start, end = int(learned[0]), int(learned[-1]) + 1
    if not start:
        raise InvalidArgument("prompt", "has no tokens of its own; the first trained token needs one before it")
    return TrainingSample(
        prompt_token_ids=np.array(tokens.token_ids[:start], dtype=np.int32),
        completion_token_ids=np.array(tokens.token_ids[start:end], dtype=np.int32),
        loss_mask=np.array(tokens.assistant_mask[start:end], dtype=np.float32),
        images=images,
    )
