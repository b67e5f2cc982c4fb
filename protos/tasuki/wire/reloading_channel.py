"""A channel whose certificate and token may change: every call uses the current ones."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tasuki.wire.credentials import Credentials, TlsMaterial, read_tokens, tls_files
from tasuki.wire.reloaded import Reloaded

_OLD_CALLS_S = 24 * 3600.0
"""How long calls with old certificates may keep running."""


class ReloadingChannel(grpc.aio.Channel):
    """Reconnects when the files of `credentials` change. grpcio cannot reload a client's certificates (grpc/grpc#41779).

    A running call keeps its connection. Raises InvalidArgument for unusable files.
    """

    def __init__(self, target: str, credentials: Credentials, *, options: Sequence[tuple[str, int | str]]) -> None:
        # Channels with different certificates must not share a connection.
        self._target, self._options = target, [*options, ("grpc.use_local_subchannel_pool", 1)]
        self._tls: Reloaded[TlsMaterial] | None = None
        self._tokens: Reloaded[tuple[str, ...]] | None = None
        if credentials.ca is not None:
            files = tls_files(credentials)
            self._tls = Reloaded(files.paths, files.read)
        if credentials.token_file is not None:
            path = Path(credentials.token_file)
            self._tokens = Reloaded([path], lambda: read_tokens("credentials.token_file", path))
        self._material = self._newest()
        self._channel = self._open()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ReloadingChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._calling(lambda: self._current().unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._calling(lambda: self._current().unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._calling(lambda: self._current().stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._calling(lambda: self._current().stream_stream(*args, **kwargs))

    def _calling(self, newest: Callable[[], Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return newest()(*args, metadata=(*(metadata or ()), *self._authorization()), **kwargs)

        return call

    def _authorization(self) -> tuple[tuple[str, str], ...]:
        return () if self._tokens is None else (("authorization", f"Bearer {self._tokens.value[0]}"),)

    def _newest(self) -> TlsMaterial | None:
        return None if self._tls is None else self._tls.value

    def _current(self) -> grpc.aio.Channel:
        material = self._newest()
        if material != self._material:
            self._material = material
            old, self._channel = self._channel, self._open()
            task = asyncio.get_running_loop().create_task(old.close(_OLD_CALLS_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._channel

    def _open(self) -> grpc.aio.Channel:
        if self._material is None:
            return grpc.aio.insecure_channel(self._target, options=self._options)
        material = self._material
        credentials = grpc.ssl_channel_credentials(material.ca, private_key=material.key, certificate_chain=material.cert)
        return grpc.aio.secure_channel(self._target, credentials, options=self._options)
