"""Validation of a training run's inputs before any service starts, so that errors appear within seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tasuki.client.dataset import Row, read_jsonl, row_place
from tasuki.config.schema import NodeConfig, TrainConfig
from tasuki.models.config_json import read_json_object, size
from tasuki.node.model_folder import check_model_folder
from tasuki.runs.folder import CHECKPOINTS, RUN_FILES
from tasuki.runs.settings import RunSettings, field_as_key
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument, PathExists


@dataclass(frozen=True, slots=True)
class TrainInputs:
    train: TrainConfig
    tokenizer: ModelTokenizer
    rows: list[Row]
    eval_rows: list[Row]
    longest_sample: int
    """Tokens of the longest prompt in `rows` plus the longest allowed completion; of the longest allowed episode."""
    seed: int


def read_inputs(config: NodeConfig, *, now: datetime | None = None) -> TrainInputs:
    """now: as of ModelTokenizer. Raises InvalidArgument or PathNotFound, naming the key, the file and the line."""
    train = config.train
    if train is None:
        raise InvalidArgument("train", "the configuration has neither a [train] nor an [sft] table: nothing to train")
    check_model_folder(config.model.path)
    with field_as_key("dataset", "train.dataset"):
        rows = read_jsonl(train.dataset, columns=train.columns)
    with field_as_key("dataset", "train.eval_dataset"):
        eval_rows = [] if train.eval_dataset is None else read_jsonl(train.eval_dataset, columns=train.columns)
    _check_stop_tokens(config, train)
    tokenizer = ModelTokenizer(config.model.path, now=now)
    limit = min(_context_length(config), config.most_micro_batch_tokens)
    if train.episode is not None and train.episode.max_tokens is not None:
        if train.episode.max_tokens > limit:
            raise InvalidArgument(
                "train.episode.max_tokens", f"is {train.episode.max_tokens}; a sample may have {limit} tokens"
            )
        limit = train.episode.max_tokens
    most = train.max_prompt_tokens
    with field_as_key("dataset", "train.dataset"):
        longest = check_lengths(
            rows,
            tokenizer=tokenizer,
            limit=limit,
            key="train.max_new_tokens",
            max_new_tokens=train.max_new_tokens,
            max_prompt_tokens=most,
            path=train.dataset,
        )
    key, max_new_tokens = "train.eval.max_new_tokens", train.eval.max_new_tokens
    if max_new_tokens is None:
        key, max_new_tokens = "train.max_new_tokens", train.max_new_tokens
    with field_as_key("dataset", "train.eval_dataset"):
        check_lengths(
            eval_rows,
            tokenizer=tokenizer,
            limit=limit,
            key=key,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=most,
            path=str(train.eval_dataset),
        )
    return TrainInputs(train, tokenizer, rows, eval_rows, longest if train.episode is None else limit, config.seed)


def check_output(settings: RunSettings) -> None:
    """Raises PathExists if the output folder contains an earlier run."""
    output_dir = settings.output_dir
    for name in (*RUN_FILES, CHECKPOINTS):
        if (output_dir / name).exists():
            text = f"{output_dir / name} exists from an earlier run; choose another folder, or continue that run with --resume"
            raise PathExists(f"{settings.table}.output_dir: {text}", path=output_dir)


def check_lengths(
    rows: Sequence[Row],
    *,
    tokenizer: ModelTokenizer,
    limit: int,
    key: str,
    max_new_tokens: int,
    path: Path | str,
    max_prompt_tokens: int | None = None,
) -> int:
    """Returns the tokens of the longest prompt plus max_new_tokens; 0 without rows.

    limit: tokens of prompt plus completion. max_prompt_tokens: as configured. Raises InvalidArgument naming the first row whose prompt
    is too long or leaves no room for max_new_tokens; or `key`, which sets max_new_tokens, if it leaves no room for any prompt.
    """
    if rows and max_new_tokens >= limit:
        text = f"is {max_new_tokens}, which leaves no room for a prompt: prompt plus completion may have {limit} tokens"
        raise InvalidArgument(key, text, limit=limit)
    longest = 0
    for index, row in enumerate(rows):
        try:
            num_tokens = len(tokenizer.encode_prompt(row["prompt"], row))
        except InvalidArgument as error:
            raise InvalidArgument("dataset", f"{row_place(path, index)}: {error.message}") from error
        if not num_tokens:
            raise InvalidArgument("dataset", f"{row_place(path, index)}: the prompt has no tokens")
        if max_prompt_tokens is not None and num_tokens > max_prompt_tokens:
            text = f"is {max_prompt_tokens}, but {row_place(path, index)}: the prompt has {num_tokens} tokens; raise it, or remove the row"
            raise InvalidArgument("train.max_prompt_tokens", text, num_tokens=num_tokens)
        if num_tokens > limit - max_new_tokens:
            room = f"with {key}, at most {limit - max_new_tokens} fit"
            text = f"{row_place(path, index)}: the prompt has {num_tokens} tokens; {room}; shorten or remove it"
            raise InvalidArgument("dataset", text, num_tokens=num_tokens)
        longest = max(longest, num_tokens + max_new_tokens)
    return longest


def _check_stop_tokens(config: NodeConfig, train: TrainConfig) -> None:
    """Raises InvalidArgument for a stop token outside the model's vocabulary."""
    vocab_size: Any = _model_table(config).get("vocab_size")
    if not isinstance(vocab_size, int):  # unknown families may keep it elsewhere
        return
    unknown = [token for token in train.stop_token_ids if token >= vocab_size]
    if unknown:
        raise InvalidArgument(
            "train.stop_token_ids",
            f"{unknown[0]} is not a token id of the model; give 0 to {vocab_size - 1}",
            vocab_size=vocab_size,
        )


def _context_length(config: NodeConfig) -> int:
    """Context length of the rollout to start."""
    if config.rollout.context_length is not None:
        return config.rollout.context_length
    return size(_model_table(config), "max_position_embeddings", default=config.most_micro_batch_tokens)


def _model_table(config: NodeConfig) -> dict[str, Any]:
    return read_json_object(config.model.path / "config.json", field="model.path")
