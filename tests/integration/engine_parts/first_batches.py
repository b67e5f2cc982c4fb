"""The engine's first batches at the start of the rollout service, when they do not end."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tasuki.rollout.serve import Shutdown, warm_up
from tasuki.wire.errors import DeadlineExceeded, InternalError


class Endless:
    """An engine that never answers."""

    was_cut = False

    async def warm_up(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cut = True


@pytest.mark.parametrize("end", ["death", "stop", "deadline"])
async def test_first_batches_that_do_not_end_are_cut_and_a_dead_rank_is_named(end: str) -> None:
    engine, shutdown = Endless(), Shutdown(SimpleNamespace(unwatch=lambda: None))
    if end != "deadline":
        asyncio.get_running_loop().call_soon(shutdown.on_death if end == "death" else shutdown.stop.set)
    raised = {"death": InternalError, "deadline": DeadlineExceeded}.get(end)
    with pytest.raises(raised) if raised else nullcontext():
        await warm_up(engine, shutdown, timeout_s=0.05 if end == "deadline" else 60)
    assert engine.was_cut
