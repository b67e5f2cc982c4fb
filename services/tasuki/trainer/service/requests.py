"""Reads and checks what callers send: streams of samples, loss settings, paths."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

from tasuki.v1.trainer_pb2 import (
    ComputeLogProbsHeader,
    ComputeLogProbsRequest,
    ForwardBackwardHeader,
    ForwardBackwardRequest,
    LossConfig,
    OptimStepRequest,
    PolicyKind,
)
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import InvalidArgument

_Header = TypeVar("_Header", ForwardBackwardHeader, ComputeLogProbsHeader)


async def read_forward_backward(
    requests: AsyncIterator[ForwardBackwardRequest],
) -> tuple[ForwardBackwardHeader, list[TrainingSample]]:
    """The whole stream. Raises InvalidArgument unless a header comes first, and only there."""
    return await _read_stream(requests, ForwardBackwardHeader())


async def read_compute_log_probs(
    requests: AsyncIterator[ComputeLogProbsRequest],
) -> tuple[ComputeLogProbsHeader, list[TrainingSample]]:
    """The whole stream, as read_forward_backward does."""
    return await _read_stream(requests, ComputeLogProbsHeader())


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


def loss_with_defaults(loss: LossConfig) -> LossConfig:
    """Every field set. Raises InvalidArgument naming one that is out of its range."""
    return LossConfig(
        clip_low=_in_range(loss.clip_low if loss.HasField("clip_low") else 0.2, "header.loss.clip_low", high=1.0),
        clip_high=_in_range(loss.clip_high if loss.HasField("clip_high") else 0.2, "header.loss.clip_high"),
        kl_coef=_in_range(loss.kl_coef, "header.loss.kl_coef"),
        temperature=_temperature(loss, "header.loss.temperature"),
    )


def checked_log_probs_header(header: ComputeLogProbsHeader) -> tuple[PolicyKind.ValueType, float]:
    """Whose log-probs, at which temperature."""
    if header.policy not in PolicyKind.values() or not header.policy:
        raise InvalidArgument("header.policy", "give POLICY_KIND_POLICY or POLICY_KIND_REFERENCE")
    return header.policy, _temperature(header, "header.temperature")


def check_learning_rate(request: OptimStepRequest) -> None:
    _in_range(request.learning_rate, "learning_rate")


def check_path(text: str) -> None:
    if not Path(text).is_absolute():
        raise InvalidArgument("path", f"{text!r} is not absolute; the trainer's working folder is its own")


def _temperature(message: LossConfig | ComputeLogProbsHeader, field: str) -> float:
    value = message.temperature if message.HasField("temperature") else 1.0
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgument(field, f"{value:g} is not above 0; token log-probs of greedy sampling are those of temperature 1")
    return value


def _in_range(value: float, field: str, *, high: float = math.inf) -> float:
    if not (math.isfinite(value) and 0 <= value <= high):
        raise InvalidArgument(
            field, f"{value:g} is out of range; give a number from 0" + (f" to {high:g}" if high < math.inf else "")
        )
    return value
