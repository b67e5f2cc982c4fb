"""Calls on their way into the engine: their order, their waits, and their ends. The engine is a list of the requests given."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tasuki.rollout.generate import EngineRequest
from tasuki.rollout.request_queue import AT_ONCE, Call, Intake
from tasuki.wire.errors import InternalError

ROOM = 2 * AT_ONCE


@dataclass
class Engine:
    """Holds requests until the test ends them."""

    running: list[tuple[Call, int]] = field(default_factory=list)
    refuses: str = ""

    def submit(self, call: Call) -> None:
        first, requests = call.take()
        if call.prefix == self.refuses:
            raise InternalError("refused")
        self.running += [(call, first + place) for place in range(len(requests))]

    def room(self) -> int:
        return ROOM - len(self.running)

    def end(self, intake: Intake, number: int) -> None:
        ended, self.running = self.running[:number], self.running[number:]
        for call, index in ended:
            call.end(index, {"index": index})
        intake.notice_room()

    def num_of(self, call: Call) -> int:
        return sum(one is call for one, _ in self.running)


@asynccontextmanager
async def intake_of(engine: Engine) -> AsyncIterator[Intake]:
    intake = Intake(engine.submit, room=engine.room)
    yield intake
    intake.close()


def call_of(num_requests: int, prefix: str = "a-") -> Call:
    requests = (EngineRequest(f"{prefix}{index}.", [1], {}) for index in range(num_requests))
    return Call(requests, num_requests=num_requests, prefix=prefix)


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_a_great_call_fills_the_room_and_no_more_and_every_request_ends_once() -> None:
    engine = Engine()
    async with intake_of(engine) as intake:
        call = call_of(5 * AT_ONCE + 7)
        intake.enter(call)
        assert intake.num_waiting == 5 * AT_ONCE + 7
        await turns()
        assert (len(engine.running), intake.num_waiting) == (ROOM, 3 * AT_ONCE + 7)
        found: list[int] = []
        for number in (AT_ONCE - 1, 1, 3 * AT_ONCE, 3 * AT_ONCE):
            engine.end(intake, number)
            await turns()
            assert len(engine.running) <= ROOM
        engine.end(intake, ROOM)
        while ended := await call.ended():
            found += [index for index, _ in ended]
        assert found == list(range(5 * AT_ONCE + 7))
        assert (intake.num_waiting, call.num_in_engine) == (0, 0)


async def test_the_loop_turns_between_two_parts() -> None:
    engine = Engine()
    async with intake_of(engine) as intake:
        intake.enter(call_of(ROOM))
        given = [len(engine.running)]
        while given[-1] < ROOM:
            await asyncio.sleep(0)
            given.append(len(engine.running))
        assert max(after - before for before, after in itertools.pairwise(given)) == AT_ONCE


async def test_a_second_call_begins_at_once_and_then_they_take_turns() -> None:
    engine = Engine()
    async with intake_of(engine) as intake:
        great, other, small = call_of(9 * AT_ONCE), call_of(9 * AT_ONCE, "b-"), call_of(3, "c-")
        intake.enter(great)
        await turns()
        intake.enter(other)
        intake.enter(small)
        await turns()
        assert [engine.num_of(call) for call in (great, other, small)] == [ROOM, AT_ONCE, 3]
        engine.end(intake, ROOM + AT_ONCE + 3)
        await turns()
        assert [engine.num_of(call) for call in (great, other)] == [AT_ONCE, AT_ONCE]
        assert await small.ended()
        assert not await small.ended()


async def test_what_waits_is_cut_without_the_engine() -> None:
    engine = Engine()
    async with intake_of(engine) as intake:
        call = call_of(3 * AT_ONCE)
        intake.enter(call)
        await turns()
        assert intake.cut() == AT_ONCE
        assert (intake.num_waiting, intake.cut()) == (0, 0)
        engine.end(intake, ROOM)
        await turns()
        assert engine.running == []
        ended = [pair async for pair in _all(call)]
        assert sorted(index for index, answer in ended if answer is None) == list(range(ROOM, 3 * AT_ONCE))
        assert len(ended) == 3 * AT_ONCE


async def _all(call: Call) -> AsyncIterator[tuple[int, object]]:
    while ended := await call.ended():
        for pair in ended:
            yield pair
