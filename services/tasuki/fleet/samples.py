"""What a fleet's trainer reads of the samples of a call before it deals them: all else is for the nodes to refuse."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.data.shares import call_denominator
from tasuki.v1 import trainer_pb2
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import InvalidArgument

_MAX_ANSWERED_TOKENS = 131_072
"""Of log-probs in the answer, which is one message."""


async def read_stream(requests: AsyncIterator[Any]) -> tuple[Any, list[TrainingSample]]:
    """Header and samples. Raises InvalidArgument unless a header comes first and only there, and without samples."""
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
    """Raises InvalidArgument for a call without samples. A node's share may have none."""
    if not samples:
        raise InvalidArgument("samples", "the call has no samples")
    return samples


def num_tokens(sample: TrainingSample) -> int:
    return len(sample.prompt_token_ids) + len(sample.completion_token_ids)


def loss_denominator(samples: Sequence[TrainingSample], config: LossConfig) -> float:
    """What the loss of the whole call is divided by. Raises InvalidArgument when no token counts."""
    lengths = [len(sample.completion_token_ids) for sample in samples]
    # A mask of a wrong length counts all tokens here; the sample's node refuses it.
    masks = [
        list(sample.loss_mask) if len(sample.loss_mask) == length else []
        for sample, length in zip(samples, lengths, strict=True)
    ]
    if not any(any(mask) or not mask for mask in masks):
        raise InvalidArgument("samples[].loss_mask", "masks every token of the call; at least one must count")
    return call_denominator(masks, lengths, config=config)


def check_log_probs_of(header: trainer_pb2.ForwardBackwardHeader, samples: Sequence[TrainingSample]) -> None:
    """Raises InvalidArgument for a sample that is not there, and for more tokens than an answer holds."""
    field, positions = "header.log_probs_of", header.log_probs_of
    if positions and max(positions) >= len(samples):
        raise InvalidArgument(field, f"names sample {max(positions)}, but the call has {len(samples)}")
    named = sum(len(samples[position].completion_token_ids) for position in positions)
    if named > _MAX_ANSWERED_TOKENS:
        raise InvalidArgument(field, f"names {named} tokens; at most {_MAX_ANSWERED_TOKENS} fit, name fewer samples")
