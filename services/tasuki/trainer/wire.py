"""Encodes roles, samples and scores between the front and its ranks; samples as columns of little-endian numbers. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import chain, pairwise

import numpy as np
from google.protobuf.struct_pb2 import Value
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.setting import SettingError
from tasuki.models.routes import Routes
from tasuki.trainer.data.samples import SampleImages, Samples
from tasuki.v1 import loss_pb2
from tasuki.v1.ranks_pb2 import SampleColumns
from tasuki.v1.trainer_pb2 import MetricPart
from tasuki.v1.types_pb2 import ROLE_CRITIC, ROLE_POLICY, ROLE_REFERENCE
from tasuki.wire.errors import InvalidArgument


class Role(StrEnum):
    """A network of the trainer."""

    POLICY = "policy"
    """Trained and served."""
    REFERENCE = "reference"
    """The frozen weights that training started from."""
    CRITIC = "critic"
    """Trained; estimates the value of each token."""


ROLES = {ROLE_POLICY: Role.POLICY, ROLE_REFERENCE: Role.REFERENCE, ROLE_CRITIC: Role.CRITIC}
ROLE_MESSAGES = {role: message for message, role in ROLES.items()}


def encode_parts(samples: Samples, parts: Sequence[Sequence[int]]) -> list[SampleColumns]:
    """The samples at the positions of each part. The first message has the distinct images of all, each once."""
    chosen = [samples.select(part) for part in parts]
    if samples.images is None:
        return [_encode(one) for one in chosen]
    images = samples.images.select(np.fromiter(chain(*parts), np.int64)).used()
    bounds = np.cumsum([0, *map(len, parts)]).tolist()
    own = [images.select(np.arange(first, end)) for first, end in pairwise(bounds)]
    messages = [_encode(replace(one, images=each)) for one, each in zip(chosen, own, strict=True)]
    if len(images.grids_U3):
        first = messages[0]
        first.grids, first.levels, first.level_values = (
            each.tobytes() for each in (images.grids_U3, images.levels_PD, images.values_CL)
        )
        first.merge_size = images.merge_size
    return messages


def _encode(samples: Samples) -> SampleColumns:
    images = samples.images
    return SampleColumns(
        num_prompt_tokens=samples.num_prompt_S.tobytes(),
        num_completion_tokens=samples.num_completion_S.tobytes(),
        policy_versions=samples.policy_version_S.tobytes(),
        token_ids=samples.token_ids_T.tobytes(),
        columns={name: column_N.tobytes() for name, column_N in samples.columns.items()},
        prefixes=b"" if samples.prefix_S is None else samples.prefix_S.tobytes(),
        routes=b"" if samples.routes_TR is None else samples.routes_TR.tobytes(),
        has_wide_routes=samples.routes_TR is not None and samples.routes_TR.itemsize > 1,
        num_images=b"" if images is None else images.num_images_S.tobytes(),
        image_indices=b"" if images is None else images.image_I.tobytes(),
        image_starts=b"" if images is None else images.start_I.tobytes(),
    )


def _images(message: SampleColumns, *, first: SampleColumns) -> SampleImages:
    grids_U3 = np.frombuffer(first.grids, np.int64).reshape(-1, 3)
    return SampleImages(
        num_images_S=np.frombuffer(message.num_images, np.int64),
        image_I=np.frombuffer(message.image_indices, np.int64),
        start_I=np.frombuffer(message.image_starts, np.int64),
        grids_U3=grids_U3,
        levels_PD=np.frombuffer(first.levels, np.uint8).reshape(grids_U3.prod(axis=1).sum(), -1),
        values_CL=np.frombuffer(first.level_values, np.float32).reshape(-1, 256),
        merge_size=first.merge_size,
    )


def decode_parts(messages: Sequence[SampleColumns]) -> list[Samples]:
    """Inverse of encode_parts. Its results refer to the messages' bytes."""
    return [_decode(message, first=messages[0]) for message in messages]


def _decode(message: SampleColumns, *, first: SampleColumns) -> Samples:
    return Samples(
        num_prompt_S=np.frombuffer(message.num_prompt_tokens, dtype=np.int64),
        num_completion_S=np.frombuffer(message.num_completion_tokens, dtype=np.int64),
        policy_version_S=np.frombuffer(message.policy_versions, dtype=np.uint64),
        token_ids_T=np.frombuffer(message.token_ids, dtype=np.int32),
        columns={name: np.frombuffer(content, dtype=np.float32) for name, content in message.columns.items()},
        prefix_S=np.frombuffer(message.prefixes, dtype=np.int32) if message.prefixes else None,
        routes_TR=_routes(message, num_tokens=len(message.token_ids) // 4) if message.routes else None,
        images=_images(message, first=first) if message.image_indices else None,
    )


def _routes(message: SampleColumns, *, num_tokens: int) -> Routes:
    return np.frombuffer(message.routes, "<i2" if message.has_wide_routes else np.uint8).reshape(num_tokens, -1)


def decode_scores(content: bytes, *, num_tokens_S: NDArray[np.int64], wanted: Sequence[int]) -> list[NDArray[np.float32]]:
    """Scores of the samples at the positions `wanted` of a micro-batch."""
    scores_N = np.frombuffer(content, dtype=np.float32)
    ends = np.cumsum(num_tokens_S).tolist()
    return [scores_N[end - count : end] for end, count in ((ends[place], int(num_tokens_S[place])) for place in wanted)]


def decode_loss(message: loss_pb2.LossConfig) -> LossConfig:
    """Settings that are not given take their defaults. Raises InvalidArgument naming the field."""
    try:
        return LossConfig.read(message.name, {key: _plain(value) for key, value in message.settings.fields.items()})
    except SettingError as error:
        field = "name" if error.field == "name" else f"settings.{error.field}"
        raise InvalidArgument(f"header.loss.{field}", error.problem) from error


def _plain(value: Value) -> object:
    match value.WhichOneof("kind"):
        case "struct_value":
            return {key: _plain(each) for key, each in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(each) for each in value.list_value.values]
        case None | "null_value":
            return None
        case kind:
            return getattr(value, kind)


def merge_parts(parts: Sequence[Mapping[str, MetricPart]]) -> dict[str, MetricPart]:
    """Merges the metrics of all that reported a part."""
    joined: dict[str, MetricPart] = {}
    for name in sorted({name for part in parts for name in part}):
        metrics = [part[name] for part in parts if name in part]
        totals = [metric.total for metric in metrics]
        joined[name] = MetricPart(
            total=max(totals) if metrics[0].is_maximum else sum(totals),
            weight=sum(metric.weight for metric in metrics),
            is_maximum=metrics[0].is_maximum,
        )
    return joined


def merge_metrics(parts: Mapping[str, MetricPart]) -> dict[str, float]:
    """Means and maxima; leaves out means over nothing."""
    return {name: part.total if part.is_maximum else part.total / part.weight for name, part in parts.items() if part.weight}
