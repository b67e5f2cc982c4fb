"""Completions of callers who never ask for a phase: they wait while the trainer has the GPUs, and go on after a changeover."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tasuki.client.async_client import AsyncClient
from tasuki.client.generation import Part
from tasuki.client.types import FinishReason, Phase, Sample, SamplingParams, VersionSpan
from tasuki.client.version_spans import continued, merged, spans_of, unfinished
from tasuki.wire.errors import NodeDown, PeerUnavailable, TasukiError

_LOOK_EVERY_S = 0.1
_TIMEOUT_S = 3600.0
Decode = Callable[[NDArray[np.int32]], str]


class Rollout:
    """A node's rollout. Use it in an `async with` block, which follows the node's phase."""

    context_length: int

    def __init__(self, target: str, *, decode: Decode) -> None:
        """decode: text of token ids, in which stop texts are found that a changeover has split."""
        self._target, self._decode = target, decode
        self._client = AsyncClient(target, timeout_s=_TIMEOUT_S)
        self._serves = asyncio.Event()

    async def __aenter__(self) -> Rollout:
        """Raises as AsyncClient.rollout_state."""
        try:
            self.context_length = (await self._client.rollout_state()).context_length
        except BaseException:
            await self._client.close()
            raise
        self._follower = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._follower.cancel()
        await asyncio.gather(self._follower, return_exceptions=True)
        await self._client.close()

    async def acquire(self) -> None:
        """Brings the node to phase ROLLOUT. Raises as AsyncClient.acquire."""
        await self._client.acquire(Phase.ROLLOUT)

    async def complete(self, prompt: NDArray[np.int32], sampling: SamplingParams, *, session_key: str) -> Sample:
        """Completes a prompt over any number of changeovers. Raises InvalidArgument as rollout does, and NodeDown."""
        assert sampling.max_new_tokens is not None
        limit = sampling.max_new_tokens
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
            tokens = np.concatenate([prompt, whole.token_ids])
            left = replace(sampling, max_new_tokens=limit - len(whole.token_ids))
            try:
                samples = await self._client.generate_if_served(Part(tokens, left, 1, session_key=session_key))
            except PeerUnavailable:
                samples = []
            if not samples:
                await asyncio.sleep(_LOOK_EVERY_S)  # the coordinator tells of the end of a phase a moment later
                continue
            (sample,) = samples
            joined = continued(whole, sample, max_new_tokens=limit)
            if not (is_whole_only and joined.finish_reason is FinishReason.CUT):
                whole = stopped(joined, sampling.stop, self._decode) if len(whole.token_ids) else joined
        return whole

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._client.watch()) as states:
                    async for watched in states:
                        if Phase.of(watched.state.phase) is Phase.ROLLOUT:
                            self._serves.set()
                        else:
                            self._serves.clear()
            except NodeDown:  # another node may have started in its place
                await self._client.close()
                self._client = AsyncClient(self._target, timeout_s=_TIMEOUT_S)
            except TasukiError:
                pass
            await asyncio.sleep(_LOOK_EVERY_S)


def stopped(sample: Sample, stop: Sequence[str], decode: Decode) -> Sample:
    """The sample up to the token that completes the first of the stop texts; rollout does not see one that a cut has split."""

    def has_stop(num_tokens: int) -> bool:
        text = decode(sample.token_ids[:num_tokens])
        return any(one in text for one in stop)

    most = len(sample.token_ids)
    if not stop or not has_stop(most):
        return sample
    least = 1
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if has_stop(middle) else (middle + 1, most)
    spans, left = list[VersionSpan](), most
    for span in spans_of(sample):
        spans.append(VersionSpan(num_tokens=min(left, span.num_tokens), policy_version=span.policy_version))
        left -= spans[-1].num_tokens
    spans = merged([span for span in spans if span.num_tokens])
    return replace(
        sample,
        token_ids=sample.token_ids[:most],
        rollout_log_probs=sample.rollout_log_probs[:most],
        finish_reason=FinishReason.STOP,
        policy_version=spans[-1].policy_version,
        version_spans=spans if len(spans) > 1 else (),
        routed_experts=sample.routed_experts[: len(sample.prompt_token_ids) + most - 1],
    )
