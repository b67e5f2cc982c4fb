"""Checks of a trainer call's samples before they are distributed over a fleet; the nodes check the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.data.shares import call_denominator
from tasuki.v1 import trainer_pb2
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import InvalidArgument

_MAX_ANSWERED_TOKENS = 131_072
"""Maximum tokens with log-probs in the answer, which is one message."""


async def read_stream(requests: AsyncIterator[Any]) -> tuple[Any, list[TrainingSample]]:
    """Reads header and samples. Raises InvalidArgument unless exactly the first message is a header, and without samples."""
    header, samples = None, list[TrainingSample]()
    async for request in requests:
        part = request.WhichOneof("part")
        if part == "header" and header is None:
            header = request.header
        elif part == "samples" and header is not None:
            samples.extend(request.samples.samples)
        else:
            raise InvalidArgument("part", "the first message carries `header`, all others `samples`")
    if header is None:
        raise InvalidArgument("header", "missing; the first message carries it")
    return header, require(samples)


def require(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Raises InvalidArgument for a call without samples, although a node's share may have none."""
    if not samples:
        raise InvalidArgument("samples", "the call has no samples")
    return samples


def num_tokens(sample: TrainingSample) -> int:
    return len(sample.prompt_token_ids) + len(sample.completion_token_ids)


def loss_denominator(samples: Sequence[TrainingSample], config: LossConfig) -> float:
    """Divisor of the whole call's loss. Raises InvalidArgument if no token counts."""
    lengths = [len(sample.completion_token_ids) for sample in samples]
    # A mask of wrong length counts all tokens here; the sample's node refuses it.
    masks = [
        list(sample.loss_mask) if len(sample.loss_mask) == length else []
        for sample, length in zip(samples, lengths, strict=True)
    ]
    if not any(any(mask) or not mask for mask in masks):
        raise InvalidArgument("samples[].loss_mask", "masks every token of the call; at least one must count")
    return call_denominator(masks, lengths, config=config)


def check_log_probs_of(header: trainer_pb2.ForwardBackwardHeader, samples: Sequence[TrainingSample]) -> None:
    """Raises InvalidArgument for a missing sample, and for more tokens than fit in an answer."""
    field, positions = "header.log_probs_of", header.log_probs_of
    if positions and max(positions) >= len(samples):
        raise InvalidArgument(field, f"names sample {max(positions)}, but the call has {len(samples)}")
    named = sum(len(samples[position].completion_token_ids) for position in positions)
    if named > _MAX_ANSWERED_TOKENS:
        raise InvalidArgument(field, f"names {named} tokens; at most {_MAX_ANSWERED_TOKENS} fit, name fewer samples")
