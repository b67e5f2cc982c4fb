"""Memory usage on the wire, as both memory services report it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tasuki.memory.tags import DeviceUsage, MemoryTag, ServiceUsage, TagUsage
from tasuki.v1 import memory_pb2, types_pb2
from tasuki.wire.errors import DeadlineExceeded, InvalidArgument

USAGE_TIMEOUT_S = 4.0
"""How long ranks may take to answer; they do between two calls. Below the time that the command line waits."""
TAG_VALUES: Mapping[MemoryTag, types_pb2.MemoryTag.ValueType] = {
    MemoryTag.WEIGHTS: types_pb2.MEMORY_TAG_WEIGHTS,
    MemoryTag.GRADIENTS: types_pb2.MEMORY_TAG_GRADIENTS,
    MemoryTag.OPTIMIZER: types_pb2.MEMORY_TAG_OPTIMIZER,
    MemoryTag.KV_CACHE: types_pb2.MEMORY_TAG_KV_CACHE,
    MemoryTag.CUDA_GRAPH: types_pb2.MEMORY_TAG_CUDA_GRAPH,
    MemoryTag.EXPORT: types_pb2.MEMORY_TAG_EXPORT,
}
TAGS = {value: tag for tag, value in TAG_VALUES.items()}
_INTERVAL_MS = range(20, 60_001)
_DEFAULT_INTERVAL_MS = 1000


def usage_response(tags: Sequence[TagUsage], device: DeviceUsage) -> memory_pb2.GetUsageResponse:
    """Response of one rank."""
    return memory_pb2.GetUsageResponse(
        tags=[types_pb2.TagUsage(**_values(TagUsage, usage), tag=TAG_VALUES[usage.tag], rank=device.rank) for usage in tags],
        devices=[types_pb2.DeviceUsage(**_values(DeviceUsage, device))],
    )


def joined(answers: Sequence[memory_pb2.GetUsageResponse]) -> memory_pb2.GetUsageResponse:
    """Merged response of all ranks."""
    return memory_pb2.GetUsageResponse(
        tags=[tag for answer in answers for tag in answer.tags],
        devices=[device for answer in answers for device in answer.devices],
    )


def read_usage(response: memory_pb2.GetUsageResponse) -> ServiceUsage:
    """Decodes the output of `usage_response` and `joined`, without tags that this build does not know."""
    return ServiceUsage(
        tags=tuple(TagUsage(tag=TAGS[usage.tag], **_values(TagUsage, usage)) for usage in response.tags if usage.tag in TAGS),
        devices=tuple(DeviceUsage(**_values(DeviceUsage, device)) for device in response.devices),
    )


def _values(kind: type[TagUsage | DeviceUsage], usage: object) -> dict[str, Any]:
    """Fields that message and dataclass share by name: all but the tag."""
    return {field.name: getattr(usage, field.name) for field in fields(kind) if field.name != "tag"}


async def watch_usage(
    request: memory_pb2.WatchUsageRequest, read: Callable[[], Awaitable[memory_pb2.GetUsageResponse]]
) -> AsyncIterator[memory_pb2.WatchUsageResponse]:
    """Stream of WatchUsage. There is no answer while the ranks run a long command."""
    interval_ms = request.interval_ms if request.HasField("interval_ms") else _DEFAULT_INTERVAL_MS
    if interval_ms not in _INTERVAL_MS:
        raise InvalidArgument("interval_ms", f"{interval_ms} ms; from {_INTERVAL_MS.start} to {_INTERVAL_MS.stop - 1}")
    clock = asyncio.get_running_loop()
    while True:
        started = clock.time()
        try:
            response = memory_pb2.WatchUsageResponse(usage=await read())
        except DeadlineExceeded:
            continue
        response.time.GetCurrentTime()
        yield response
        await asyncio.sleep(max(0.0, started + interval_ms / 1000 - clock.time()))
