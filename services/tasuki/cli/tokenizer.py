"""Text and token ids, by the model folder's own tokenizer. The one place of the command line that needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tasuki.wire.errors import InvalidArgument, PathNotFound


class ModelTokenizer:
    """The tokenizer of a Hugging Face model folder."""

    def __init__(self, model_path: Path) -> None:
        """Raises PathNotFound when the folder has none, InvalidArgument when it cannot be loaded."""
        try:
            from transformers import AutoTokenizer  # takes seconds, and only training needs it
        except ImportError as error:
            raise InvalidArgument("model.path", "text needs transformers: pip install 'tasuki[trainer]'") from error
        try:
            # Any: transformers' return type is a union of every tokenizer.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except OSError as error:
            raise PathNotFound(f"{model_path} has no tokenizer: {error}", path=model_path) from error
        except ValueError as error:
            raise InvalidArgument("model.path", f"the tokenizer of {model_path} cannot be loaded: {error}") from error

    def encode_prompt(self, prompt: object) -> list[int]:
        """A string as it is; a list of chat messages by the model's chat template, up to where the answer begins."""
        if isinstance(prompt, str):
            return cast(list[int], self._tokenizer.encode(prompt))
        if self._tokenizer.chat_template is None:
            raise InvalidArgument("prompt", "is a list of chat messages, but the model's tokenizer has no chat template")
        return cast(list[int], self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Without special tokens such as the end of the sequence."""
        return cast(str, self._tokenizer.decode(token_ids, skip_special_tokens=True))
