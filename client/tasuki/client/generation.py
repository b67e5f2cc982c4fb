"""Generation over several concurrent RPCs, merged into one stream."""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
import numpy as np

from tasuki.client import encode
from tasuki.client.encode import TokenIds
from tasuki.client.messages import TOKENIZE, message_of
from tasuki.client.types import Sample, SamplingParams
from tasuki.v1 import rollout_pb2
from tasuki.wire.errors import Asleep, Draining, InvalidArgument, TasukiError, from_rpc_error
from tasuki.wire.routes import Whole

if TYPE_CHECKING:
    from tasuki.v1.rollout_pb2_grpc import RolloutServiceAsyncStub

# Limits the length of one answer. How many requests run at once is up to the engine.
_MAX_SAMPLES = 8192
Request = tuple[int, rollout_pb2.GenerateRequest]
"""A request and the position of its first prompt among all prompts."""


def requests(
    prompts: Sequence[TokenIds],
    sampling_params: SamplingParams,
    *,
    num_samples: int,
    call_number: int | None = None,
    session_key: str | None = None,
    images: Sequence[Sequence[bytes]] = (),
) -> list[Request]:
    """Splits prompts into requests that each fit a message. Their ids make a repeated request return the same samples on a CPU.

    images: files of each prompt's images. Raises InvalidArgument for prompts that no rollout would accept.
    """
    if not isinstance(prompts, Sized) or isinstance(prompts, str):  # callers may have no types
        raise InvalidArgument("prompts", f"is of type {type(prompts).__name__}; give a list of lists of token ids{TOKENIZE}")
    if not len(prompts):
        raise InvalidArgument("prompts", "empty; give at least one")
    given = {"num_samples": num_samples, "call_number": call_number, "session_key": session_key}
    common = message_of(rollout_pb2.GenerateRequest, given, wanted={"session_key": "a text"})
    if not common.num_samples:
        raise InvalidArgument("num_samples", f"is {num_samples}; give a whole number of at least 1")
    if not isinstance(sampling_params, SamplingParams):
        raise InvalidArgument("sampling_params", f"is of type {type(sampling_params).__name__}; give SamplingParams(...)")
    if images and len(images) != len(prompts):
        raise InvalidArgument("images", f"has {len(images)} entries for {len(prompts)} prompts; give a list of files for each")
    given = [{"token_ids": prompt, "images": images[index] if images else ()} for index, prompt in enumerate(prompts)]
    parts = [
        message_of(rollout_pb2.Prompt, values, below=f"prompts[{index}].", wanted=encode.WANTED)
        for index, values in enumerate(given)
    ]
    return [
        (
            start,
            rollout_pb2.GenerateRequest(
                request_id=uuid.uuid4().hex,
                prompts=chunk,
                num_samples=num_samples,
                sampling_params=sampling_params.message(),
                first_prompt=start,
                call_number=call_number,
                session_key=common.session_key,
            ),
        )
        for start, chunk in encode.cut(parts, field="prompts", max_parts=max(1, _MAX_SAMPLES // num_samples))
    ]


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of one prompt, to be drawn or continued."""

    prompt: TokenIds
    sampling_params: SamplingParams
    num_samples: int
    call_number: int | None = None
    session_key: str | None = None
    images: Sequence[bytes] = ()


def number_of_call(step: int, owner: int, part: int) -> int:
    """A call's number, from a step's, a group's or episode's, and that of its part or turn."""
    return int.from_bytes(hashlib.sha256(f"{step}/{owner}/{part}".encode()).digest()[:8], "big")


def requests_of(parts: Sequence[Part]) -> list[Request]:
    """One request for each part. A drain cuts them at once, whatever its grace period."""
    made: list[Request] = []
    for place, part in enumerate(parts):
        ((_, request),) = requests(
            [part.prompt],
            part.sampling_params,
            num_samples=part.num_samples,
            call_number=part.call_number,
            session_key=part.session_key,
            images=[part.images],
        )
        request.cut_on_drain = True
        made.append((place, request))
    return made


async def draw(rollout: "RolloutServiceAsyncStub", part: Part, *, timeout_s: float) -> Sample | None:
    """The only sample of `part`; None if rollout sleeps or drains before it begins. Costs less than `stream`, which merges calls."""
    ((_, request),) = requests_of([part])
    prompt, whole, drawn = np.asarray(part.prompt, np.int32), Whole(), None
    try:
        async for response in rollout.Generate(request, timeout=timeout_s):
            for sample in whole.samples(response.samples):
                drawn = encode.sample_from_proto(sample, prompt_index=0, prompt_token_ids=prompt, images=part.images)
    except grpc.aio.AioRpcError as error:
        failure = from_rpc_error(error)
        if not isinstance(failure, Asleep | Draining):
            raise failure from None
    return drawn


async def stream(rollout: "RolloutServiceAsyncStub", requests: Sequence[Request], *, timeout_s: float) -> AsyncIterator[Sample]:
    """Yields samples of all requests as they complete. The first error cancels the others; so does leaving early."""
    arrivals: asyncio.Queue[Sample | BaseException | None] = asyncio.Queue()

    async def read(start: int, request: rollout_pb2.GenerateRequest) -> None:
        whole = Whole()
        prompts = [np.array(prompt.token_ids, dtype=np.int32) for prompt in request.prompts]
        images = [tuple(prompt.images) for prompt in request.prompts]
        try:
            async for response in rollout.Generate(request, timeout=timeout_s):
                for sample in whole.samples(response.samples):
                    own = sample.prompt_index
                    given = {"prompt_token_ids": prompts[own], "images": images[own]}
                    arrivals.put_nowait(encode.sample_from_proto(sample, prompt_index=start + own, **given))
            arrivals.put_nowait(None)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            is_cut = request.cut_on_drain and isinstance(failure, Asleep | Draining)  # before it began
            arrivals.put_nowait(None if is_cut else _named_from(start, failure))

    def note_failure(reader: asyncio.Task[None]) -> None:
        # Without it the caller would wait forever, such as for a sample that this release cannot read.
        if not reader.cancelled() and (error := reader.exception()) is not None:
            arrivals.put_nowait(error)

    readers = [asyncio.create_task(read(start, request)) for start, request in requests]
    for reader in readers:
        reader.add_done_callback(note_failure)
    try:
        num_open = len(readers)
        while num_open:
            arrival = await arrivals.get()
            if isinstance(arrival, BaseException):
                raise arrival
            if arrival is None:
                num_open -= 1
            else:
                yield arrival
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _named_from(start: int, error: TasukiError) -> TasukiError:
    """Error of one request. Unless it is the first request, the text says where its prompt positions start."""
    if start and isinstance(error, InvalidArgument):
        return InvalidArgument(error.metadata.get("field", "prompts"), f"{error.message} (counted from prompt {start})")
    return error
