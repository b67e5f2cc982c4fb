"""State that returns behind LOAD_TRAINER is reported while it moves, and once on arrival. A fake replaces the GPU's copies."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.tags import MemoryTag, Movement, MovementKind
from tasuki.trainer.backends.fsdp.returning import TAGS, Returning
from tasuki.wire.errors import InternalError


@dataclass
class Copies:
    """Copies of one tag."""

    is_done: bool = False
    error: InternalError | None = None

    def wait(self) -> int:
        if self.error is not None:
            raise self.error
        return 100


class Allocator:
    def __init__(self) -> None:
        self.copies = {tag: Copies() for tag in TAGS}

    def resume_async(self, tags: list[MemoryTag]) -> Copies:
        return self.copies[tags[0]]

    def arena(self, _tag: MemoryTag) -> Any:
        return SimpleNamespace(usage=lambda: SimpleNamespace(mapped_bytes=100))


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


@pytest.fixture
def reached() -> list[str]:
    return []


@pytest.fixture
def returning(allocator: Allocator, reached: list[str]) -> Returning:
    returning = Returning(cast(NativeAllocator, allocator), reached=reached.append)
    returning.begin(TAGS)
    return returning


def test_what_is_still_arriving_is_begun_and_pending(allocator: Allocator, returning: Returning) -> None:
    allocator.copies[MemoryTag.OPTIMIZER].is_done = True
    assert returning.take_begun() == (Movement(MovementKind.RETURN, MemoryTag.WEIGHTS, 100),)
    assert returning.pending() == {MemoryTag.WEIGHTS: 100}
    assert returning.take_ended() == ()
    allocator.copies[MemoryTag.WEIGHTS].is_done = True
    assert returning.pending() == {}
    (ended,) = returning.take_ended()
    assert (ended.kind, ended.tag, ended.num_bytes) == (MovementKind.RETURN, MemoryTag.WEIGHTS, 100)
    assert ended.seconds > 0 and ended.end_time <= time.time()
    returning.wait()
    assert returning.take_ended() == (), "an end is told once, and only of what was said to go on"


def test_who_waits_for_content_ends_its_return(returning: Returning, reached: list[str]) -> None:
    returning.take_begun()
    returning.wait([MemoryTag.WEIGHTS])
    assert reached == ["return.done"] and returning.pending() == {MemoryTag.OPTIMIZER: 100}
    assert [one.tag for one in returning.take_ended()] == [MemoryTag.WEIGHTS]


def test_a_return_that_fails_has_moved_nothing(allocator: Allocator, returning: Returning) -> None:
    returning.take_begun()
    allocator.copies[MemoryTag.WEIGHTS].error = InternalError("the driver refused")
    with pytest.raises(InternalError):
        returning.wait()
    assert [(one.tag, one.num_bytes) for one in returning.take_ended()] == [(MemoryTag.WEIGHTS, 0)]
