"""The synchronous client: the same verbs, run by an AsyncClient on a separate thread."""

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from tasuki.client.aside import Pending
from tasuki.client.async_client import AsyncClient
from tasuki.wire.credentials import Credentials

_Answer = TypeVar("_Answer")
_Given = ParamSpec("_Given")


def _verb(
    method: Callable[Concatenate[AsyncClient, _Given], Coroutine[Any, Any, _Answer]],
) -> "Callable[Concatenate[Client, _Given], _Answer]":
    @functools.wraps(method)
    def verb(self: "Client", *arguments: _Given.args, **options: _Given.kwargs) -> _Answer:
        return self._run(method(self._client, *arguments, **options))

    return verb


def _stream(
    method: Callable[Concatenate[AsyncClient, _Given], AsyncGenerator[_Answer, None]],
) -> "Callable[Concatenate[Client, _Given], Generator[_Answer, None, None]]":
    @functools.wraps(method)
    def stream(self: "Client", *arguments: _Given.args, **options: _Given.kwargs) -> Generator[_Answer, None, None]:
        return self._iterate(method(self._client, *arguments, **options))

    return stream


class Client:
    """A client of one node; AsyncClient documents the verbs. Close it, or use it in a `with` block."""

    def __init__(
        self,
        target: str | None = None,
        *,
        state_dir: Path | str | None = None,
        credentials: Credentials | None = None,
        timeout_s: float = 600.0,
        recovery_timeout_s: float = 600.0,
        otlp_endpoint: str | None = None,
        otlp_headers_file: Path | str | None = None,
    ) -> None:
        self._client = AsyncClient(
            target,
            state_dir=state_dir,
            credentials=credentials,
            timeout_s=timeout_s,
            recovery_timeout_s=recovery_timeout_s,
            otlp_endpoint=otlp_endpoint,
            otlp_headers_file=otlp_headers_file,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tasuki-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._run(self._leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    generate = _verb(AsyncClient.generate)
    generate_stream = _stream(AsyncClient.generate_stream)
    generate_until = _verb(AsyncClient.generate_until)
    generate_if_served = _verb(AsyncClient.generate_if_served)
    begin_run = _verb(AsyncClient.begin_run)
    forward_backward = _verb(AsyncClient.forward_backward)
    forward_backward_custom = _verb(AsyncClient.forward_backward_custom)
    optim_step = _verb(AsyncClient.optim_step)
    discard_gradients = _verb(AsyncClient.discard_gradients)
    compute_log_probs = _verb(AsyncClient.compute_log_probs)
    with_old_log_probs = _verb(AsyncClient.with_old_log_probs)
    compute_values = _verb(AsyncClient.compute_values)
    save = _verb(AsyncClient.save)
    load = _verb(AsyncClient.load)
    export_model = _verb(AsyncClient.export_model)
    begin_acquire = _verb(AsyncClient.begin_acquire)
    acquire = _verb(AsyncClient.acquire)
    state = _verb(AsyncClient.state)
    trainer_state = _verb(AsyncClient.trainer_state)
    rollout_state = _verb(AsyncClient.rollout_state)
    watch = _stream(AsyncClient.watch)
    changeovers = _verb(AsyncClient.changeovers)

    def submit(self, work: Callable[[AsyncClient], Coroutine[Any, Any, _Answer]]) -> Future[_Answer]:
        """Begins an asynchronous function of the AsyncClient on its thread, beside the other verbs."""
        return asyncio.run_coroutine_threadsafe(work(self._client), self._loop)

    async def _leave(self) -> None:
        await self._client.close()
        # Calls interrupted by Ctrl-C.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this Client is closed; open another one")
        if threading.current_thread() is self._thread:
            work.close()
            name = getattr(work, "__name__", "close")
            raise RuntimeError(f"`{name}` was called on the thread that would run it: call it outside of a custom loss")
        pending, tasks = Pending[_Answer](), list[asyncio.Task[_Answer]]()

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: pending.end(task.result))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(begin)
            return pending.wait()
        except BaseException:
            # Ctrl-C while waiting: cancel the call, so that it does not continue unnoticed.
            self._loop.call_soon_threadsafe(cancel)
            raise

    def _iterate(self, stream: AsyncGenerator[_Answer, None]) -> Generator[_Answer, None, None]:
        async def advance() -> _Answer | None:
            return await anext(stream, None)

        try:
            while (answer := self._run(advance())) is not None:
                yield answer
        finally:
            self._run(stream.aclose())
