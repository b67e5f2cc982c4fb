"""Text to token ids with the model folder's tokenizer. The only module of the command line that needs transformers."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tasuki.client.chat import ChatTokens, Message, chat_tokens
from tasuki.wire.errors import InvalidArgument, NotInstalled, PathNotFound
from tasuki.wire.extras import install_extras

# Mark of the assistant's text in a chat template, as transformers searches for it.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ModelTokenizer:
    """The tokenizer of a Hugging Face model folder."""

    def __init__(self, model_path: Path) -> None:
        """Raises PathNotFound if the folder has no tokenizer, InvalidArgument if it cannot be loaded, NotInstalled without transformers."""
        try:
            from huggingface_hub.errors import StrictDataclassError  # comes with transformers

            tokenizers = _auto_tokenizer()
        except ImportError as error:
            text = f"the model's tokenizer needs transformers: {install_extras('trainer')}"
            raise NotInstalled(text, packages="transformers", extras="trainer") from error
        try:
            # Any: transformers' return type is a union of every tokenizer.
            self._tokenizer: Any = tokenizers.from_pretrained(model_path, local_files_only=True)
        except OSError as error:
            raise PathNotFound(f"{model_path} has no tokenizer: {error}", path=model_path) from error
        except (ValueError, StrictDataclassError) as error:
            raise InvalidArgument("model.path", f"the tokenizer of {model_path} cannot be loaded: {error}") from error

    def encode_prompt(self, prompt: object) -> list[int]:
        """Encodes a string as it is, or chat messages by the chat template, ending with the generation prompt."""
        if isinstance(prompt, str):
            return cast(list[int], self._tokenizer.encode(prompt))
        self._check_template("prompt")
        return self._render_prompt(cast(Sequence[Message], prompt))

    def encode_completion(self, completion: str) -> list[int]:
        """Encodes without beginning-of-text tokens and appends the end-of-sequence token."""
        eos_token_id = self._tokenizer.eos_token_id
        if eos_token_id is None:
            raise InvalidArgument("completion", "the model's tokenizer has no end-of-sequence token to end it with")
        token_ids = cast(list[int], self._tokenizer.encode(completion, add_special_tokens=False))
        return token_ids if token_ids[-1:] == [eos_token_id] else [*token_ids, eos_token_id]

    def encode_chat(self, messages: Sequence[Message]) -> ChatTokens:
        """Encodes a conversation by the model's chat template. Takes the assistant's tokens from the template's `{% generation %}` marks,
        or else finds them by rendering prefixes; refuses templates that do not allow that.
        """
        self._check_template("messages")
        if not (self._tokenizer.is_fast and _GENERATION.search(self._tokenizer.get_chat_template())):
            eos_token_id = self._tokenizer.eos_token_id
            return chat_tokens(messages, render=self._render, render_prompt=self._render_prompt, eos_token_id=eos_token_id)
        rendered = self._apply(messages, return_dict=True, return_assistant_tokens_mask=True)
        return ChatTokens(rendered["input_ids"], rendered["assistant_masks"])

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Decodes without special tokens such as end of sequence."""
        return cast(str, self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _render(self, messages: Sequence[Message]) -> list[int]:
        return cast(list[int], self._apply(messages, return_dict=False))

    def _render_prompt(self, messages: Sequence[Message]) -> list[int]:
        return cast(list[int], self._apply(messages, add_generation_prompt=True, return_dict=False))

    def _apply(self, messages: Sequence[Message], **options: bool) -> Any:
        """Raises InvalidArgument for messages that the template refuses."""
        from jinja2 import TemplateError  # comes with transformers

        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except (TemplateError, TypeError) as error:
            raise InvalidArgument("messages", f"the model's chat template refuses them: {error}") from error

    def _check_template(self, field: str) -> None:
        if self._tokenizer.chat_template is None:
            raise InvalidArgument(field, "is a list of chat messages, but the model's tokenizer has no chat template")


def _auto_tokenizer() -> Any:
    """Imports transformers' AutoTokenizer without torch, which would take seconds and 0.7 GB and is not needed for text.

    A process that has already imported torch or transformers keeps them.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        from transformers import AutoTokenizer

        return AutoTokenizer
    log = logging.getLogger("transformers")
    sys.modules["torch"] = cast(Any, None)  # marks the module as not importable
    log.disabled = True  # it would warn that torch is missing
    try:
        from transformers import AutoTokenizer
    finally:
        del sys.modules["torch"]
        log.disabled = False
    return AutoTokenizer
