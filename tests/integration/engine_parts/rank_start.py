"""A rank that cannot start tells the front why, before SGLang's scheduler exists."""

from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tasuki.rollout.sglang import scheduler
from tasuki.wire.errors import InternalError


def test_a_rank_without_its_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_built(*_: object, **__: object) -> NoReturn:
        raise InternalError("libtasuki_memory.so is not built: run `make native`")

    monkeypatch.setattr(scheduler, "rank_allocator", not_built)
    front, rank = Pipe()
    arguments: Any = SimpleNamespace(device="cpu")
    with pytest.raises(InternalError):
        scheduler.run_scheduler(arguments, arguments, 0, 0, rank)
    assert front.poll(0)
    assert front.recv() == {
        "status": "failed", "reason": "INTERNAL", "problem": "libtasuki_memory.so is not built: run `make native`",
    }  # fmt: skip
