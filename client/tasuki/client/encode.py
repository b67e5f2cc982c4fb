"""Conversion between the client's values and protobuf messages, and splitting lists into bounded messages."""

import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.aggregation import call_denominator
from tasuki.algorithms.loss_types import LossConfig
from tasuki.client.messages import message_of
from tasuki.client.types import FinishReason, ForwardBackwardResult, Phase, Role, Routes, Sample, TrainingSample
from tasuki.v1 import loss_pb2, rollout_pb2, trainer_pb2, types_pb2
from tasuki.v1.trainer_pb2 import TokenLogProbs
from tasuki.wire.channel import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES
from tasuki.wire.errors import InternalError, InvalidArgument
from tasuki.wire.images import send_once
from tasuki.wire.routes import in_parts

TokenIds = Sequence[int] | NDArray[np.int32]
_Part = TypeVar("_Part", rollout_pb2.Prompt, types_pb2.TrainingSample)
_Scores = TypeVar("_Scores", NDArray[np.float32], TokenLogProbs)
# Tag and length of one entry of a repeated field.
_ENTRY_OVERHEAD_BYTES = 8
_MAX_PART_BYTES = MAX_MESSAGE_BYTES - MAX_CHUNK_BYTES // 4
_SEQUENCES = [
    name
    for name in types_pb2.TrainingSample.DESCRIPTOR.fields_by_name
    if name not in ("policy_version", "temperature", "version_spans", "routed_experts", "images", "image_digest")
]
WANTED = {"images": "a list of the bytes of PNG, JPEG or WebP files", "image_digest": "the sample's"}


def loss_to_proto(loss: LossConfig) -> loss_pb2.LossConfig:
    """Raises InvalidArgument for anything but a LossConfig."""
    if not isinstance(loss, LossConfig):  # callers may have no types
        raise InvalidArgument("loss", f"is of type {type(loss).__name__}; give LossConfig(loss=...)")
    message = loss_pb2.LossConfig(name=loss.name)
    message.settings.update(loss.settings())
    return message


def training_sample_to_proto(sample: TrainingSample, *, index: int) -> types_pb2.TrainingSample:
    if not isinstance(sample, TrainingSample):  # callers may have no types
        raise InvalidArgument(f"samples[{index}]", f"is of type {type(sample).__name__}; give a TrainingSample")
    values = {name: getattr(sample, name) for name in TrainingSample.__slots__ if name != "routed_experts"}
    if isinstance(sample.advantages, Real) or getattr(sample.advantages, "ndim", 1) == 0:
        values["advantages"] = [sample.advantages]
    elif np.size(sample.advantages) == 1 < (num_tokens := len(sample.completion_token_ids)):
        problem = f"has one entry for {num_tokens} tokens; give one for each, or a plain number for the whole completion"
        raise InvalidArgument(f"samples[{index}].advantages", problem)
    message = message_of(types_pb2.TrainingSample, values, below=f"samples[{index}].", wanted=WANTED)
    field, num_rows = f"samples[{index}].routed_experts", len(sample.routed_experts)
    num_routed = len(sample.prompt_token_ids) + len(sample.completion_token_ids) - 1
    # The service sees bytes alone: another shape of as many would be other experts. Only services know the tokens of images.
    if num_rows not in (0, num_routed) and not sample.images:
        raise InvalidArgument(field, f"has {num_rows} rows; give the {num_routed} of the sample, one a token but the last")
    message.routed_experts = _route_bytes(sample.routed_experts, field=field)
    return message


def _route_bytes(routes: Routes, *, field: str) -> bytes:
    if not len(routes):
        return b""
    with suppress(ValueError):
        given = np.asarray(routes)
        if given.ndim == 2 and given.dtype.kind in "iu" and given.min() >= 0 and given.max() < 256:  # callers may have no types
            return given.astype(np.uint8).tobytes()
    raise InvalidArgument(field, "is not a sample's; give its routed_experts, unchanged")


def _routes(content: bytes, token_bytes: int) -> Routes:
    return np.frombuffer(content, np.uint8).reshape(-1, token_bytes) if content else ()


def with_old_log_probs(sample: TrainingSample, scored: TokenLogProbs) -> TrainingSample:
    """The sample with its log-probs and, if there are any, experts of the old policy's pass."""
    routes = _routes(scored.routed_experts, scored.route_bytes) if scored.routed_experts else sample.routed_experts
    return replace(sample, old_log_probs=np.array(scored.log_probs, dtype=np.float32), routed_experts=routes)


def training_sample_from_proto(sample: types_pb2.TrainingSample) -> TrainingSample:
    """The sample of `training_sample_to_proto`, with arrays for its sequences."""
    arrays: dict[str, Any] = {
        name: np.array(getattr(sample, name), dtype=np.int32 if name.endswith("_ids") else np.float32) for name in _SEQUENCES
    }
    temperature = sample.temperature if sample.HasField("temperature") else None
    if len(sample.advantages) == 1 < len(sample.completion_token_ids):
        arrays["advantages"] = sample.advantages[0]
    # Images have tokens of their own, whose number only services know: their routes are in one row.
    num_routed = 1 if sample.images else len(sample.prompt_token_ids) + len(sample.completion_token_ids) - 1
    return TrainingSample(
        **arrays,
        policy_version=sample.policy_version,
        temperature=temperature,
        version_spans=list(sample.version_spans),
        routed_experts=_routes(sample.routed_experts, len(sample.routed_experts) // max(1, num_routed)),
        images=list(sample.images),
        image_digest=sample.image_digest,
    )


def sample_from_proto(
    sample: types_pb2.Sample, *, prompt_index: int, prompt_token_ids: NDArray[np.int32], images: Sequence[bytes] = ()
) -> Sample:
    return Sample(
        prompt_index=prompt_index,
        sample_index=sample.sample_index,
        token_ids=np.array(sample.token_ids, dtype=np.int32),
        rollout_log_probs=np.array(sample.rollout_log_probs, dtype=np.float32),
        finish_reason=FinishReason.known(sample.finish_reason),
        policy_version=sample.policy_version,
        temperature=sample.temperature,
        has_exact_log_probs=sample.has_exact_log_probs,
        prompt_token_ids=prompt_token_ids,
        version_spans=list(sample.version_spans),
        routed_experts=_routes(sample.routed_experts, sample.route_bytes),
        images=images,
        image_digest=sample.image_digest,
    )


def sample_to_proto(sample: Sample) -> types_pb2.Sample:
    """Without the prompt and its images: `sample_from_proto` takes them."""
    own = ("finish_reason", "routed_experts", "route_bytes")
    values = {name: getattr(sample, name) for name in types_pb2.Sample.DESCRIPTOR.fields_by_name if name not in own}
    routes = _route_bytes(sample.routed_experts, field="routed_experts")
    return types_pb2.Sample(
        **values,
        finish_reason=sample.finish_reason.number,
        routed_experts=routes,
        route_bytes=len(routes) // max(1, len(sample.routed_experts)),
    )


def sample_to_text(sample: Sample) -> str:
    """As JSON holds it; without the prompt and its images."""
    return b64encode(sample_to_proto(sample).SerializeToString()).decode()


def sample_from_text(text: str, *, prompt_token_ids: Sequence[int], images: Sequence[bytes] = ()) -> Sample:
    """Raises ValueError, or protobuf's DecodeError."""
    prompt, sample = np.array(prompt_token_ids, np.int32), types_pb2.Sample.FromString(b64decode(text))
    return sample_from_proto(sample, prompt_index=0, prompt_token_ids=prompt, images=images)


def enum_to_proto(kind: type[Phase | Role], value: object) -> Any:
    if value not in list(map(str, kind)):  # callers may have no types
        raise InvalidArgument(
            kind.__name__.lower(), f"is {value!r}; give {' or '.join(f'{kind.__name__}.{one}' for one in kind)}"
        )
    return kind(value).number


def forward_backward_header(
    role: Role, loss: LossConfig, *, log_probs_of: Sequence[int], num_samples: int
) -> trainer_pb2.ForwardBackwardHeader:
    """Converts to a header without its command id. Raises InvalidArgument naming the invalid argument."""
    proto_role, proto_loss = enum_to_proto(Role, role), loss_to_proto(loss)
    header = trainer_pb2.ForwardBackwardHeader(role=proto_role, loss=proto_loss, num_samples=num_samples)
    try:
        header.log_probs_of.extend(log_probs_of)
        is_within = all(position < num_samples for position in header.log_probs_of)
    except (TypeError, ValueError):
        is_within = False
    if not is_within:
        raise InvalidArgument("log_probs_of", f"is {log_probs_of!r}; give positions within the call's {num_samples} samples")
    return header


def places_in(step_samples: Sequence[TrainingSample], samples: Sequence[TrainingSample]) -> list[int]:
    """Places of the samples, the same objects, in the step; [] if the step has an object twice."""
    places = {id(sample): place for place, sample in enumerate(step_samples)}
    return [places[id(sample)] for sample in samples] if len(places) == len(step_samples) else []


def forward_backward_result(answer: trainer_pb2.ForwardBackwardResponse) -> ForwardBackwardResult:
    own = {name: getattr(answer, name) for name in ForwardBackwardResult.__slots__ if name != "metrics"}
    return ForwardBackwardResult(**own, metrics=dict(answer.metrics))  # a map would answer 0 for a metric that is absent


def loss_of_part(
    loss: LossConfig, samples: Sequence[TrainingSample], *, step_samples: Sequence[TrainingSample] | None
) -> LossConfig:
    """The loss of a call with `samples`, a part of a step's `step_samples`; None if it has all. Raises InvalidArgument."""
    if step_samples is None or not isinstance(loss, LossConfig):
        return loss
    if not isinstance(step_samples, Sequence):  # callers may have no types
        raise InvalidArgument("step_samples", f"is of type {type(step_samples).__name__}; give a list of TrainingSample")
    if loss.denominator is not None or len(step_samples) < len(samples):
        given = f"{len(step_samples)} samples for a call of {len(samples)} and denominator {loss.denominator}"
        raise InvalidArgument("step_samples", f"got {given}; give all samples of the optimizer step, and no denominator")
    known = set(map(id, step_samples))
    strangers = [index for index, sample in enumerate(samples) if id(sample) not in known]
    if strangers:
        problem = f"has no samples[{strangers[0]}] of the call; give all samples of the optimizer step, the same objects"
        raise InvalidArgument("step_samples", problem)
    lengths = [len(sample.completion_token_ids) for sample in step_samples]
    return replace(loss, denominator=call_denominator([list(one.loss_mask) for one in step_samples], lengths, config=loss))


def path_to_send(path: Path | str) -> str:
    """The path, absolute: services have other working directories. Raises InvalidArgument for one that cannot be sent."""
    if not isinstance(path, Path | str) or not str(path):  # callers may have no types
        raise InvalidArgument("path", f"is {path!r}; name a folder")
    absolute = str(Path(path).absolute())
    try:
        absolute.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("path", f"{absolute!r} is not UTF-8, and cannot be sent") from error
    return absolute


def cut(parts: Sequence[_Part], *, field: str, max_parts: int = sys.maxsize) -> Iterator[tuple[int, Sequence[_Part]]]:
    """Splits messages into runs of at most `max_parts` that fit a chunk, each with the position of its first part.

    A larger part, such as one with images, goes alone. Raises InvalidArgument naming `field` and position if no message holds it.
    """
    start, num_bytes = 0, 0
    for index, part in enumerate(parts):
        part_bytes = part.ByteSize() + _ENTRY_OVERHEAD_BYTES
        if part_bytes > _MAX_PART_BYTES:
            raise InvalidArgument(f"{field}[{index}]", f"takes {part_bytes} bytes; at most {_MAX_PART_BYTES} can be sent")
        if index > start and (num_bytes + part_bytes > MAX_CHUNK_BYTES or index - start == max_parts):
            yield start, parts[start:index]
            start, num_bytes = index, 0
        num_bytes += part_bytes
    if start < len(parts):
        yield start, parts[start:]


def training_chunks(samples: Sequence[TrainingSample]) -> list[trainer_pb2.TrainingSamples]:
    """Splits `samples` into messages of bounded size. Raises InvalidArgument naming the invalid sample."""
    if not isinstance(samples, Sequence):  # callers may have no types
        raise InvalidArgument("samples", f"is of type {type(samples).__name__}; give a list of TrainingSample")
    if not samples:
        raise InvalidArgument("samples", "empty; give at least one")
    parts = [training_sample_to_proto(sample, index=index) for index, sample in enumerate(samples)]
    send_once(parts)
    return [trainer_pb2.TrainingSamples(samples=chunk) for _, chunk in cut(list(in_parts(parts)), field="samples")]


def complete(scores: list[_Scores], *, num_samples: int) -> list[_Scores]:
    """Raises InternalError if scores are missing."""
    if len(scores) != num_samples:
        raise InternalError(f"trainer answered for {len(scores)} of {num_samples} samples")
    return scores
