"""Observes the services, and waits for those that do not answer yet."""

from __future__ import annotations

import asyncio

from tasuki.coordinator.peers import Observed, Peers
from tasuki.memory.stages import Phase
from tasuki.wire.errors import EnginePoisoned, PeerUnavailable

_POLL_S, _POLL_IDLE_S = 0.2, 0.02


class ReadinessProbe:
    """`waiting` names the awaited service, or is empty; `poison` is the last observed reason to restart rollout."""

    def __init__(self, peers: Peers, *, timeout_s: float) -> None:
        """timeout_s: longest wait for a service."""
        self._peers, self._timeout_s = peers, timeout_s
        self.waiting = self.poison = ""

    async def wait_idle(self) -> Observed:
        """State of both services once no command of an earlier coordinator runs. Raises PeerUnavailable on timeout."""
        clock = asyncio.get_running_loop().time
        ends = clock() + self._timeout_s
        seen = await self._peers.observe()
        while seen.in_stage:
            if clock() > ends:
                seen.require_all()
            self.waiting = f"waiting for {seen.in_stage[0]} to end a stage that was cut off"
            await asyncio.sleep(_POLL_IDLE_S)
            seen = await self._peers.observe()
        return seen

    async def wait_ready(self, phase: Phase) -> Observed:
        """State of both services once no service needed to reach `phase` is missing.

        Raises PeerUnavailable, or EnginePoisoned, if one does not come back in time.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + self._timeout_s
        while True:
            seen = await self.wait_idle()
            lacking, self.poison = seen.lacks(phase), seen.poison
            self.waiting = "" if lacking is None else f"waiting for {lacking} to come back"
            if lacking is None:
                return seen
            if clock() > ends and seen.poison:
                raise EnginePoisoned(f"rollout has not been restarted in {self._timeout_s:g} s: {seen.poison}")
            if clock() > ends:
                raise PeerUnavailable(f"{lacking} did not come back in {self._timeout_s:g} s", peer=lacking)
            await asyncio.sleep(_POLL_S)
