"""A channel whose calls all carry the same metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from tasuki.wire.wrapped_channel import WrappedChannel


class LabelledChannel(WrappedChannel):
    """Adds `metadata` behind a call's own; keys that end in "-bin" take bytes."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        super().__init__(channel)
        self._metadata = tuple(metadata)

    def calling(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)

        return call
