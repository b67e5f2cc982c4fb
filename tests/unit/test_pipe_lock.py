"""Locks of pipes: one holder at a time, over processes, and a wait that ends."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import RLock

from tasuki.client.pipe_lock import PipeLockContext
from tests.limits import limit_s


def test_a_lock_has_one_holder_over_processes_and_passes_when_it_is_released() -> None:
    context = PipeLockContext()
    lock = context.RLock()
    ours, theirs = context.Pipe()
    assert lock.acquire()
    assert lock.acquire()
    lock.release()
    child = context.Process(target=take_twice, args=(lock, theirs))
    child.start()
    assert ours.recv() == "not taken"
    lock.release()
    assert ours.recv() == "taken"
    started = time.monotonic()
    assert not lock.acquire(block=False)
    assert not lock.acquire(timeout=0.2)
    assert 0.2 <= time.monotonic() - started < limit_s(5)
    ours.send("release")
    assert lock.acquire(timeout=30)
    child.join()
    assert child.exitcode == 0


def take_twice(lock: RLock, pipe: Connection) -> None:
    pipe.send("taken" if lock.acquire(timeout=0.1) else "not taken")
    with lock, lock:
        pipe.send("taken")
        pipe.recv()
