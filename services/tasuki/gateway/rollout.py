"""Completions of callers who never ask for a phase: they wait while the trainer has the GPUs, and go on after a changeover."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress

import numpy as np
from numpy.typing import NDArray

from tasuki.client.async_client import AsyncClient
from tasuki.client.generation import Part
from tasuki.client.types import FinishReason, Phase, Sample, SamplingParams
from tasuki.client.version_spans import Decode, continued, left_of, unfinished
from tasuki.wire.errors import NodeDown, PeerUnavailable, TasukiError
from tasuki.wire.stages import Stage

_LOOK_EVERY_S, _LONGEST_PAUSE_S, _LOOK_TIMEOUT_S = 0.1, 2.0, 10.0
_LOST_S = 120.0
"""Time that requests wait for a rollout that is asleep, or whose node has ended, while the node's phase was ROLLOUT."""
_TIMEOUT_S = 3600.0


class Rollout:
    """A node's rollout. Use it in an `async with` block, which follows the node's phase."""

    context_length: int

    def __init__(self, target: str, *, decode: Decode, acquires: bool = False) -> None:
        """decode: text of token ids with special ones, in which stop texts are found that a changeover has split.

        acquires: whether to bring the node to phase ROLLOUT first, and again if rollout was restarted in it.
        """
        self._target, self._decode, self._acquires = target, decode, acquires
        self._client = AsyncClient(target, timeout_s=_TIMEOUT_S)
        self._serves = asyncio.Event()
        self._phase: Phase | None = None
        self._lost = ""
        """Why requests are refused, if rollout has been gone for too long."""
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Rollout":
        """Raises as AsyncClient.rollout_state, and as acquire."""
        try:
            self.context_length = (await self._client.rollout_state()).context_length
            if self._acquires:
                await self._client.acquire(Phase.ROLLOUT)
        except BaseException:
            await self._client.close()
            raise
        self._follower = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks = [task for task in (self._follower, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def complete(
        self, prompt: NDArray[np.int32], sampling: SamplingParams, *, session_key: str, images: Sequence[bytes] = ()
    ) -> Sample:
        """Completes a prompt over any number of changeovers. Raises InvalidArgument as rollout does, and PeerUnavailable."""
        penalties = (
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
            sampling.min_new_tokens,
        )
        is_whole_only = sampling.json_schema is not None or any(one is not None for one in penalties)  # of all tokens so far
        whole = unfinished(prompt)
        while whole.finish_reason is FinishReason.CUT:
            await self._serves.wait()
            if self._lost:
                raise PeerUnavailable(self._lost, peer="rollout")
            tokens = np.concatenate([prompt, whole.token_ids])
            try:
                part = Part(tokens, left_of(sampling, whole), 1, session_key=session_key, images=images)
                sample = await self._client.generate_if_served(part)
            except PeerUnavailable:
                sample = None
            if sample is None:
                self._serves.clear()
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.create_task(self._look())
                continue
            joined = continued(whole, sample, sampling, self._decode)
            if not (is_whole_only and joined.finish_reason is FinishReason.CUT):
                whole = joined
        return whole

    async def _look(self) -> None:
        """Finds out when rollout, lost in phase ROLLOUT, serves again. A restarted one is asleep until the phase is acquired again."""
        loop = asyncio.get_running_loop()
        pause_s, giving_up = _LOOK_EVERY_S, loop.call_later(_LOST_S, self._give_up)
        try:
            while True:
                await asyncio.sleep(pause_s)  # also, the coordinator tells of the end of a phase a moment later
                if self._phase is not Phase.ROLLOUT or (self._serves.is_set() and not self._lost):
                    return
                is_reached = False
                with suppress(TasukiError, TimeoutError):
                    async with asyncio.timeout(_LOOK_TIMEOUT_S):
                        stage = Stage.of((await self._client.rollout_state()).stage)
                    is_reached = True
                    if stage is Stage.RESUME_KV:
                        self._take(Phase.ROLLOUT)
                    elif self._acquires and stage is None:
                        await self._client.acquire(Phase.ROLLOUT)
                with suppress(TasukiError, TimeoutError):
                    if not is_reached:
                        async with asyncio.timeout(_LOOK_TIMEOUT_S):
                            await self._client.state()
                        giving_up.cancel()  # the node lives, and restarts rollout
                        giving_up = loop.call_later(_LOST_S, self._give_up)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            giving_up.cancel()

    def _give_up(self) -> None:
        self._lost = f"rollout has not served for over {_LOST_S:g} s in phase ROLLOUT; see `tasuki state`"
        self._serves.set()

    def _take(self, phase: Phase | None) -> None:
        self._phase, self._lost = phase, ""
        if phase is Phase.ROLLOUT:
            self._serves.set()
        else:
            self._serves.clear()

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._client.watch()) as states:
                    async for watched in states:
                        self._take(Phase.of(watched.state.phase))
            except NodeDown:  # another node may have started in its place
                await self._client.close()
                self._client = AsyncClient(self._target, timeout_s=_TIMEOUT_S)
            except TasukiError:
                pass
            await asyncio.sleep(_LOOK_EVERY_S)
