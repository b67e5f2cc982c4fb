"""Reads streams of samples: of a node's trainer and of a fleet's. No torch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from tasuki.v1.trainer_pb2 import (
    ComputeLogProbsHeader,
    ComputeLogProbsRequest,
    ComputeValuesRequest,
    ForwardBackwardHeader,
    ForwardBackwardRequest,
)
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import InvalidArgument

_Header = TypeVar("_Header", ForwardBackwardHeader, ComputeLogProbsHeader)
MAX_ANSWERED_TOKENS = 131_072
"""Maximum tokens with log-probs in the answer, which is one message."""


async def read_forward_backward(
    requests: AsyncIterator[ForwardBackwardRequest],
) -> tuple[ForwardBackwardHeader, list[TrainingSample]]:
    """Reads the whole stream. Raises InvalidArgument unless exactly the first message carries a header."""
    return await _read_stream(requests, ForwardBackwardHeader())


async def read_compute_log_probs(
    requests: AsyncIterator[ComputeLogProbsRequest],
) -> tuple[ComputeLogProbsHeader, list[TrainingSample]]:
    """Reads the whole stream, like read_forward_backward."""
    return await _read_stream(requests, ComputeLogProbsHeader())


async def read_compute_values(requests: AsyncIterator[ComputeValuesRequest]) -> list[TrainingSample]:
    """Reads the samples of the whole stream."""
    return [sample async for request in requests for sample in request.samples.samples]


async def _read_stream(requests: AsyncIterator, header: _Header) -> tuple[_Header, list[TrainingSample]]:
    samples: list[TrainingSample] = []
    has_header = False
    async for request in requests:
        part = request.WhichOneof("part")
        if part == "header" and not has_header:
            header.CopyFrom(request.header)
            has_header = True
        elif part == "samples" and has_header:
            samples.extend(request.samples.samples)
        else:
            raise InvalidArgument("part", "the first message carries `header`, all others `samples`")
    if not has_header:
        raise InvalidArgument("header", "missing; the first message carries it")
    return header, samples
