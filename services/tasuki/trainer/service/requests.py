"""Decodes and checks requests: samples, roles, loss settings, paths."""

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasuki.config.trainer_schema import MAX_LEARNING_RATE, LoraConfig
from tasuki.models.images import MAX_PATCH_BYTES, ImageProcessor
from tasuki.models.routes import Routes, RouteShape
from tasuki.trainer.data.samples import COLUMNS, SampleImages, Samples, starts
from tasuki.trainer.wire import ROLES, Role
from tasuki.v1.trainer_pb2 import (
    ComputeLogProbsHeader,
    ComputeLogProbsRequest,
    ComputeValuesRequest,
    ForwardBackwardHeader,
    ForwardBackwardRequest,
    OptimStepRequest,
)
from tasuki.v1.types_pb2 import Role as RoleMessage
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import InvalidArgument, VersionOrder
from tasuki.wire.images import Files
from tasuki.wire.routes import Whole

# A logged call is one message, of at most 2 GiB.
_MAX_ROUTE_BYTES = 3 << 29
# Fields in which a single number applies to every token.
_BROADCAST = "advantages"


def check_log_probs_of(positions: Sequence[int], *, role: Role, samples: Samples) -> None:
    """Raises InvalidArgument for a missing sample, for the critic, and for more tokens than fit in an answer."""
    field = "header.log_probs_of"
    if not positions:
        return
    if role is Role.CRITIC:
        raise InvalidArgument(field, "a critic has no log-probs; leave it empty")
    if max(positions) >= len(samples):
        raise InvalidArgument(field, f"names sample {max(positions)}, but the call has {len(samples)}")
    num_tokens = int(samples.num_completion_S[list(positions)].sum())
    if num_tokens > MAX_ANSWERED_TOKENS:
        raise InvalidArgument(field, f"names {num_tokens} tokens; at most {MAX_ANSWERED_TOKENS} fit, name fewer samples")


def check_linearized(header: ForwardBackwardHeader, *, policy_version: int, lora: LoraConfig | None) -> None:
    """Raises InvalidArgument with adapters' dropout, and VersionOrder unless the policy is that of the advantages."""
    if not header.HasField("linearized_at"):
        return
    if lora is not None and lora.dropout:
        problem = "must be 0 for a loss in Python: its log-probs are without dropout, their gradients would be with it"
        raise InvalidArgument("trainer.lora.dropout", problem)
    if header.linearized_at != policy_version:
        problem = f"the loss has seen version {header.linearized_at} of the policy, which another client has since made {policy_version}"
        raise VersionOrder(f"{problem}; call again", have=policy_version, want=header.linearized_at)


def decode_samples(
    messages: Sequence[TrainingSample],
    *,
    names: Sequence[str] = COLUMNS,
    routes: RouteShape | None = None,
    images: ImageProcessor | None = None,
) -> Samples:
    """Decodes samples with the named fields and, if `routes` are given, their experts.

    Raises InvalidArgument naming the first sample and field whose length differs from its completion's, or without possible experts.
    """
    num_completion_S = _integers([len(message.completion_token_ids) for message in messages])
    token_ids = chain.from_iterable((*message.prompt_token_ids, *message.completion_token_ids) for message in messages)
    columns = {name: _column(messages, name, num_completion_S=num_completion_S) for name in names}
    mask_N = columns.pop("loss_mask", None)
    temperatures = [message.temperature if message.HasField("temperature") else 1.0 for message in messages]
    samples = Samples(
        num_prompt_S=_integers([len(message.prompt_token_ids) for message in messages]),
        num_completion_S=num_completion_S,
        policy_version_S=np.array([message.policy_version for message in messages], dtype=np.uint64),
        token_ids_T=np.fromiter(token_ids, dtype=np.int32),
        columns={
            "loss_mask": np.ones(int(num_completion_S.sum()), dtype=np.float32) if mask_N is None else mask_N,
            "temperature": np.repeat(np.array(temperatures, dtype=np.float32), num_completion_S),
            **{name: column_N for name, column_N in columns.items() if column_N is not None},
            **_version_lags(messages),
        },
    )
    samples = _with_images(samples, messages, images)
    return samples if routes is None else replace(samples, routes_TR=_routes(messages, routes, samples.num_tokens_S))


def _with_images(samples: Samples, messages: Sequence[TrainingSample], processor: ImageProcessor | None) -> Samples:
    """The samples with a token for each square of an image's patches, and the images. Raises InvalidArgument."""
    if processor is None:
        if with_images := [index for index, message in enumerate(messages) if message.images]:
            raise InvalidArgument(f"samples[{with_images[0]}].images", "the model reads text alone; send no images")
        return samples
    files, places, digests = Files(), dict[bytes, int](), dict[tuple[int, ...], bytes]()
    images = [files.of(message, field=f"samples[{index}]") for index, message in enumerate(messages)]
    fields = dict[bytes, str]()
    for index, own in enumerate(images):
        for place, file in enumerate(own):
            fields.setdefault(file, f"samples[{index}].images[{place}]")
    num_tokens = sum(processor.header_tokens(file, field=field) for file, field in fields.items())
    if (num_bytes := num_tokens * processor.token_bytes) > MAX_PATCH_BYTES:
        problem = f"have {num_bytes} bytes of patches in one call; at most {MAX_PATCH_BYTES} fit: make several, or raise num_mini_batches"
        raise InvalidArgument("samples[].images", problem)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda file: processor.patches(file, field=fields[file]), fields))
    counts, indices, starts_I = list[int](), list[int](), list[int]()
    levels, grids = list[NDArray[np.uint8]](), list[NDArray[np.int64]]()
    length_T, first_S = np.ones(len(samples.token_ids_T), np.int64), starts(samples.num_tokens_S)
    for index, (message, given) in enumerate(zip(messages, images, strict=True)):
        field, own = f"samples[{index}]", list[int]()
        counts.append(len(given))
        own_T = slice(first_S[index], first_S[index] + samples.num_tokens_S[index])
        token_ids = samples.token_ids_T[own_T].tolist()
        if not given:
            processor.places(token_ids, 0, field=f"{field}.prompt_token_ids")
            continue
        prepared = processor.expand(token_ids, given, field=field, ids="prompt_token_ids")
        for file in given:
            place = places.setdefault(sha256(file).digest(), len(places))
            if place == len(grids):
                levels_PD, grid_13 = processor.patches(file, field=field)
                levels.append(levels_PD)
                grids.append(grid_13)
            own.append(place)
        if (known := digests.get(tuple(own))) is None:
            known = digests[tuple(own)] = prepared.digest
        if message.image_digest not in (b"", known):
            problem = (
                "differs: rollout has seen other patches of these images; give both services the same model folder and versions"
            )
            raise InvalidArgument(f"{field}.image_digest", problem)
        length_T[own_T] = prepared.lengths
        indices += own
        starts_I += prepared.starts
    if not levels:
        return samples
    distinct = SampleImages(
        num_images_S=_integers(counts),
        image_I=_integers(indices),
        start_I=_integers(starts_I),
        grids_U3=np.concatenate(grids),
        levels_PD=np.concatenate(levels),
        values_CL=processor.values_CL,
        merge_size=processor.merge_size,
    )
    return samples.expanded(length_T, distinct)


def _routes(messages: Sequence[TrainingSample], routes: RouteShape, num_tokens_S: NDArray[np.int64]) -> Routes | None:
    """[T, R]; None if no sample has any. num_tokens_S: with those of images. Raises InvalidArgument."""
    if not any(message.routed_experts for message in messages):
        return None
    check_route_bytes(sum(len(message.routed_experts) for message in messages))
    routes_TR = np.zeros((num_tokens_S.sum(), routes.num_layers * routes.experts_per_token), routes.dtype)
    first = 0
    for index, (message, num_tokens) in enumerate(zip(messages, num_tokens_S.tolist(), strict=True)):
        content, num_routed = message.routed_experts, max(0, num_tokens - 1)
        field = f"samples[{index}].routed_experts"
        if len(content) != num_routed * routes.token_bytes:
            needed = f"{num_routed * routes.token_bytes}, {routes.token_bytes} for each token but the last"
            problem = f"has {len(content)} bytes; give {needed}, in every sample or in none"
            raise InvalidArgument(field, problem)
        own = routes.read(content)
        if (fault := routes.fault(own)) is not None:
            raise InvalidArgument(f"{field}[{fault[0]}]", f"{fault[1]}; give the sample's own, unchanged")
        routes_TR[first : first + num_routed] = own
        first += num_tokens
    return routes_TR


def check_route_bytes(num_bytes: int) -> None:
    """Raises InvalidArgument for more than one message holds, of the training log or of ranks."""
    if num_bytes > _MAX_ROUTE_BYTES:
        problem = f"take {num_bytes} bytes in one call; at most {_MAX_ROUTE_BYTES} fit: make several calls"
        raise InvalidArgument("samples[].routed_experts", f"{problem}, or set trainer.router_replay to false")


def decode_role(role: RoleMessage.ValueType, *, allowed: Sequence[Role], field: str) -> Role:
    """Raises InvalidArgument unless the role is one of `allowed`."""
    decoded = ROLES.get(role)
    if decoded is None or decoded not in allowed:
        names = " or ".join(f"ROLE_{each.name}" for each in allowed)
        raise InvalidArgument(field, f"give {names}")
    return decoded


def check_learning_rate(request: OptimStepRequest) -> None:
    if not 0 <= request.learning_rate <= MAX_LEARNING_RATE:
        raise InvalidArgument("learning_rate", f"{request.learning_rate:g} is out of range; give 0 to {MAX_LEARNING_RATE:g}")


def check_path(text: str) -> None:
    if "\0" in text:
        raise InvalidArgument("path", f"{text!r} has a NUL; name a folder without one")
    path = Path(text)
    if not path.is_absolute():
        raise InvalidArgument("path", f"{text!r} is not absolute; the trainer has another working directory")
    if not path.name:
        raise InvalidArgument("path", f"{text!r} is the root of the file system; name a folder")


def _version_lags(messages: Sequence[TrainingSample]) -> dict[str, NDArray[np.float32]]:
    """Column of how many versions each token is older than its sample; none if every sample has one version. Raises InvalidArgument."""
    if not any(message.version_spans for message in messages):
        return {}
    return {"version_lag": np.concatenate([_version_lag(message, index) for index, message in enumerate(messages)])}


def _version_lag(message: TrainingSample, index: int) -> NDArray[np.float32]:
    num_tokens, last = len(message.completion_token_ids), message.policy_version
    if not message.version_spans:
        return np.zeros(num_tokens, np.float32)
    versions = [span.policy_version for span in message.version_spans]
    lengths = [span.num_tokens for span in message.version_spans]
    field = f"samples[{index}].version_spans"
    if sum(lengths) != num_tokens:
        raise InvalidArgument(
            field, f"cover {sum(lengths)} tokens of a completion of {num_tokens}; give a span for each run of tokens"
        )
    if versions != sorted(versions) or versions[-1] != last:
        problem = f"have versions {', '.join(map(str, versions))}; they must not decrease, and end with policy_version = {last}"
        raise InvalidArgument(field, problem)
    return np.repeat(np.array([last - version for version in versions], np.float32), lengths)


def _column(
    messages: Sequence[TrainingSample], name: str, *, num_completion_S: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    """A per-token field of all samples; None if no sample has it."""
    rows = [getattr(message, name) for message in messages]
    num_given_S = _integers([len(row) for row in rows])
    if not num_given_S.any():
        return None
    is_wrong_S = num_given_S != num_completion_S
    is_single_S = (num_given_S == 1) & (name == _BROADCAST)
    if name == "loss_mask":
        is_wrong_S &= num_given_S != 0
    wrong = np.flatnonzero(is_wrong_S & ~is_single_S)
    if len(wrong):
        num_tokens = num_completion_S[wrong[0]]
        allowed = f"{num_tokens}" + {_BROADCAST: " or 1" if num_tokens > 1 else "", "loss_mask": " or 0"}.get(name, "")
        problem = (
            f"has {num_given_S[wrong[0]]} entries; give {allowed}, for the completion's tokens, in every sample or in none"
        )
        raise InvalidArgument(f"samples[{wrong[0]}].{name}", problem)
    given = np.fromiter(chain.from_iterable(rows), dtype=np.float32, count=int(num_given_S.sum()))
    if (num_given_S == num_completion_S).all():
        return given
    if name == "loss_mask":
        rows = [row or [1.0] * int(length) for row, length in zip(rows, num_completion_S, strict=True)]
        return np.fromiter(chain.from_iterable(rows), dtype=np.float32, count=int(num_completion_S.sum()))
    return np.repeat(given, np.where(is_single_S, num_completion_S, 1)[np.repeat(np.arange(len(rows)), num_given_S)])


def _integers(values: Sequence[int]) -> NDArray[Any]:
    return np.array(values, dtype=np.int64)


_Header = TypeVar("_Header", ForwardBackwardHeader, ComputeLogProbsHeader)
MAX_ANSWERED_TOKENS = 131_072
"""Maximum tokens with log-probs in the answer, which is one message."""


async def read_forward_backward(
    requests: AsyncIterator[ForwardBackwardRequest],
) -> tuple[ForwardBackwardHeader, list[TrainingSample]]:
    """Reads the whole stream. Raises InvalidArgument unless exactly the first message carries a header, and for missing samples.

    To grpc.aio the stream of a client that was killed ends like a whole one.
    """
    header, samples = await _read_stream(requests, ForwardBackwardHeader())
    samples = list(Whole().samples(samples))
    if header.HasField("num_samples") and len(samples) != header.num_samples:
        raise InvalidArgument("header.num_samples", f"is {header.num_samples}, but {len(samples)} samples came")
    return header, samples


async def read_compute_log_probs(
    requests: AsyncIterator[ComputeLogProbsRequest],
) -> tuple[ComputeLogProbsHeader, list[TrainingSample]]:
    """Reads the whole stream, like read_forward_backward."""
    header, samples = await _read_stream(requests, ComputeLogProbsHeader())
    return header, list(Whole().samples(samples))


async def read_compute_values(requests: AsyncIterator[ComputeValuesRequest]) -> list[TrainingSample]:
    """Reads the samples of the whole stream."""
    return list(Whole().samples([sample async for request in requests for sample in request.samples.samples]))


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
