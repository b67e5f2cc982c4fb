"""What the engine has for a tokenizer, and completions that follow a JSON Schema, by SGLang's xgrammar: loaded for the first schema."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from tasuki.models.images import read_image_processor
from tasuki.models.tokenizer import read_tokenizer
from tasuki.wire.errors import InvalidArgument, NotInstalled

_FIELD = "sampling_params.json_schema"


def check_schema(schema: str) -> None:
    """Raises InvalidArgument for a text that is no JSON Schema, or one that xgrammar does not know; NotInstalled without xgrammar."""
    try:
        import xgrammar
    except ImportError as error:
        text = "json_schema needs xgrammar, which SGLang asks for: pip install xgrammar"
        raise NotInstalled(text, packages="xgrammar", extras="rollout") from error
    try:
        if not isinstance(root := json.loads(schema), dict):
            raise InvalidArgument(_FIELD, "must be a JSON object")
        if _has_loop(root):
            raise InvalidArgument(_FIELD, "refers to itself alone, so that no text follows it")
        xgrammar.Grammar.from_json_schema(schema)
    except (ValueError, RecursionError, RuntimeError) as error:
        cause = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip().partition("\n")[0]
        raise InvalidArgument(_FIELD, f"is no JSON Schema that xgrammar can follow: {cause:.200}") from error


def _has_loop(root: Any) -> bool:
    """Whether a `$ref`, or every alternative, leads back to itself without a value between."""

    def loops(schema: Any, above: tuple[int, ...]) -> bool:
        if not isinstance(schema, dict) or id(schema) in above:
            return isinstance(schema, dict)
        above, path, target = (*above, id(schema)), schema.get("$ref"), root
        if isinstance(path, str) and path.startswith("#"):
            for key in filter(None, path[1:].split("/")):
                target = target.get(key) if isinstance(target, dict) else None
            return loops(target, above)
        ways = [one for name in ("anyOf", "oneOf") for one in schema.get(name, ())]
        return bool(ways) and all(loops(one, above) for one in ways)

    def any_of(schema: Any) -> bool:
        inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
        return loops(schema, ()) or any(map(any_of, inner))

    return any_of(root)


class JsonGrammars:
    """The backend that SGLang's GrammarManager asks."""

    enable_strict_thinking = False

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """tokenizer: has `init_xgrammar`."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    @cached_property
    def _backend(self) -> Any:
        from sglang.srt.constrained import xgrammar_backend

        xgrammar_backend.XGrammarGrammar.allocate_vocab_mask = cast(Any, _allocate)
        xgrammar_backend.XGrammarGrammar.apply_vocab_mask = cast(Any, _mask)
        return xgrammar_backend.XGrammarGrammarBackend(self._tokenizer, vocab_size=self._vocab_size)

    def get_request_grammar_key(self, key: tuple[str, str], **_: object) -> tuple[str, str]:
        """Asked from 0.5.23 on."""
        return key

    def get_cached_or_future_value(self, key: tuple[str, str], require_reasoning: bool) -> Any:
        return self._backend.get_cached_or_future_value(key, require_reasoning)

    def set_cache(self, key: tuple[str, str], value: Any) -> None:
        self._backend.set_cache(key, value)

    def reset(self) -> None:
        if "_backend" in self.__dict__:
            self._backend.reset()


def _allocate(grammar: object, vocab_size: int, batch_size: int, device: object) -> torch.Tensor:
    """Takes the place of SGLang's function of a grammar, which pins the mask even where there is no GPU."""
    from xgrammar import allocate_token_bitmask

    mask = allocate_token_bitmask(batch_size, vocab_size)
    return mask.pin_memory() if torch.cuda.is_available() else mask


def _mask(grammar: object, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Takes the place of SGLang's function of a grammar, which masks logits on GPUs alone."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from xgrammar import apply_token_bitmask_inplace

    mask = apply_token_bitmask_inplace if logits.device.type == "cpu" else XGrammarGrammarBackend.apply_vocab_mask
    mask(logits, vocab_mask)


@dataclass(frozen=True, slots=True)
class EngineTokenizer:
    """Replaces SGLang's tokenizer where no text is produced: has the tokens that min_new_tokens must suppress, and finds stop strings."""

    folder: Path
    """Of the model. Its tokenizer is read when the first request has stop strings."""
    eos_token_id: int | None
    additional_stop_token_ids: set[int]
    vocab_size: int
    """Of the model."""

    @classmethod
    def of(cls, config: Any) -> "EngineTokenizer":
        """config: SGLang's ModelConfig."""
        first, *others = sorted(config.hf_eos_token_id) if config.hf_eos_token_id else [None]
        return cls(Path(config.model_path), first, {one for one in others if one is not None}, config.vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """As long as the most tokens that spell a stop string: its bytes. SGLang searches so many of the latest tokens, and one more."""
        return text.encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        return read_tokenizer(self.folder).decode(token_ids, has_special=True)

    def init_xgrammar(self) -> tuple[Any, None]:
        """What SGLang's grammar backend asks of a tokenizer."""
        from transformers import PreTrainedTokenizerFast
        from xgrammar import TokenizerInfo

        known = PreTrainedTokenizerFast(tokenizer_object=read_tokenizer(self.folder).backend)
        stop_token_ids = [self.eos_token_id, *self.additional_stop_token_ids]
        if (images := read_image_processor(self.folder)) is not None:
            stop_token_ids += images.placeholder_ids  # text to a schema's strings, of which the first would end the completion
        return TokenizerInfo.from_huggingface(known, vocab_size=self.vocab_size, stop_token_ids=stop_token_ids), None
