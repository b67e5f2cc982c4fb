"""Asks the services where they are, and waits for those that cannot be asked yet."""

from __future__ import annotations

import asyncio

from tasuki.coordinator.peers import Observed, Peers
from tasuki.memory.stages import Phase
from tasuki.wire.errors import EnginePoisoned, PeerUnavailable

_POLL_S, _POLL_IDLE_S = 0.2, 0.02


class ReadinessProbe:
    """`waiting` says for whom, empty when for nobody; `poison` why rollout must be restarted, as it was seen last."""

    def __init__(self, peers: Peers, *, timeout_s: float) -> None:
        """timeout_s: how long a service is waited for."""
        self._peers, self._timeout_s = peers, timeout_s
        self.waiting = self.poison = ""

    async def wait_idle(self) -> Observed:
        """What both services say when no command of an earlier coordinator runs in them. Raises PeerUnavailable when that lasts."""
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
        """The same, when no service is lacking without which there is no way to `phase`.

        Raises PeerUnavailable, or EnginePoisoned, when one does not come back in time.
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
