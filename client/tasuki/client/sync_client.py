"""The synchronous client: the same verbs, run by an AsyncClient on a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import LossConfig
from tasuki.client.aside import Pending
from tasuki.client.async_client import AsyncClient
from tasuki.client.encode import TokenIds
from tasuki.client.types import (
    Changeover,
    ForwardBackwardResult,
    NodeState,
    OptimStepResult,
    Phase,
    Role,
    RolloutState,
    Sample,
    SamplingParams,
    SaveResult,
    StageEvent,
    TrainerState,
    TrainingSample,
    Watched,
)
from tasuki.wire.credentials import Credentials

_Answer = TypeVar("_Answer")


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

    def __enter__(self) -> Client:
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

    def generate(
        self,
        prompts: Sequence[TokenIds],
        sampling_params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
        call_number: int | None = None,
    ) -> list[Sample]:
        call = self._client.generate(prompts, sampling_params, num_samples=num_samples, call_number=call_number)
        return self._run(call)

    def generate_stream(
        self,
        prompts: Sequence[TokenIds],
        sampling_params: SamplingParams | None = None,
        *,
        num_samples: int = 1,
    ) -> Generator[Sample, None, None]:
        return self._iterate(self._client.generate_stream(prompts, sampling_params, num_samples=num_samples))

    def begin_run(self, *, keep_optimizer: bool = False) -> int:
        return self._run(self._client.begin_run(keep_optimizer=keep_optimizer))

    def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        loss: LossConfig | None = None,
        *,
        role: Role = Role.POLICY,
        log_probs_of: Sequence[int] = (),
        request_id: str | None = None,
    ) -> ForwardBackwardResult:
        call = self._client.forward_backward(samples, loss, role=role, log_probs_of=log_probs_of, request_id=request_id)
        return self._run(call)

    def optim_step(
        self,
        *,
        role: Role = Role.POLICY,
        learning_rate: float | None = None,
        schedule_step: int | None = None,
        schedule_steps: int | None = None,
        request_id: str | None = None,
    ) -> OptimStepResult:
        step = self._client.optim_step(
            role=role,
            learning_rate=learning_rate,
            schedule_step=schedule_step,
            schedule_steps=schedule_steps,
            request_id=request_id,
        )
        return self._run(step)

    def discard_gradients(self, *, role: Role = Role.POLICY) -> None:
        self._run(self._client.discard_gradients(role=role))

    def compute_log_probs(self, samples: Sequence[TrainingSample], *, role: Role = Role.POLICY) -> list[NDArray[np.float32]]:
        return self._run(self._client.compute_log_probs(samples, role=role))

    def compute_values(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        return self._run(self._client.compute_values(samples))

    def save(self, path: Path | str, *, request_id: str | None = None) -> SaveResult:
        return self._run(self._client.save(path, request_id=request_id))

    def load(self, path: Path | str) -> int:
        return self._run(self._client.load(path))

    def export_model(self, path: Path | str) -> SaveResult:
        return self._run(self._client.export_model(path))

    def begin_acquire(self, phase: Phase) -> None:
        self._run(self._client.begin_acquire(phase))

    def acquire(self, phase: Phase) -> list[StageEvent]:
        return self._run(self._client.acquire(phase))

    def state(self) -> NodeState:
        return self._run(self._client.state())

    def trainer_state(self) -> TrainerState:
        return self._run(self._client.trainer_state())

    def rollout_state(self) -> RolloutState:
        return self._run(self._client.rollout_state())

    def watch(self) -> Generator[Watched, None, None]:
        return self._iterate(self._client.watch())

    def changeovers(self, *, limit: int = 50) -> list[Changeover]:
        return self._run(self._client.changeovers(limit=limit))

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
