"""A channel that adds the same metadata to every call."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from tasuki.wire.wrapped_channel import WrappedChannel


class LabelledChannel(WrappedChannel):
    """Appends `metadata` to that of each call; keys that end in "-bin" take bytes."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        super().__init__(channel)
        self._metadata = tuple(metadata)

    def calling(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)

        return call
