"""Base of channels that modify each call on another channel."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import grpc
import grpc.aio


class WrappedChannel(grpc.aio.Channel):
    """Forwards calls to `channel` and closes it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    @abstractmethod
    def calling(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the stub's `method`. path: e.g. "/tasuki.v1.TrainerService/OptimStep"."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.calling(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.calling(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.calling(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.calling(method, self._channel.stream_stream(method, *args, **kwargs))
