"""An engine that has become idle says so with its last request."""

import asyncio
from types import SimpleNamespace
from typing import cast

from tasuki.rollout.request_queue import Intake
from tasuki.rollout.sglang.engine import RolloutEngine

ENDED = {"meta_info": {"finish_reason": {"type": "stop"}}}


class TwoRequests(RolloutEngine):
    """Two requests are in the engine."""

    def __init__(self) -> None:
        self.num_finished = self.num_cut = 0
        self._requests = SimpleNamespace(rid_to_state={"first": None, "last": None})
        self._intake = cast(Intake, SimpleNamespace(num_waiting=0, notice_room=lambda: None))
        self._idle = asyncio.Event()


def test_a_wait_for_idleness_ends_with_the_last_request() -> None:
    async def run() -> None:
        engine = TwoRequests()
        waiting = asyncio.create_task(engine.become_idle(timeout_s=3600))
        for name in ("first", "last"):
            await asyncio.sleep(0.01)
            assert not waiting.done()
            del engine._requests.rid_to_state[name]
            engine.ended(ENDED)
        await asyncio.wait_for(waiting, 60)
        assert (engine.num_running, engine.num_finished) == (0, 2)

    asyncio.run(run())


def test_a_wait_for_idleness_ends_after_its_time() -> None:
    async def run() -> None:
        engine = TwoRequests()
        await engine.become_idle(timeout_s=0.01)
        assert engine.num_running == 2

    asyncio.run(run())
