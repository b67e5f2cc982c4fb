"""A command directly from the front runs while the scheduler waits for requests, never concurrently with its work."""

import threading

from tasuki.rollout.rank import EngineLock

PATIENCE_S = 10


def test_a_command_waits_until_the_lock_is_released_and_the_scheduler_until_the_command_is_done() -> None:
    lock, asked, seen = EngineLock(), threading.Event(), []
    lock.acquire()

    def command() -> None:
        asked.set()
        with lock.held():
            seen.append("command")

    thread = threading.Thread(target=command)
    thread.start()
    assert asked.wait(PATIENCE_S)
    thread.join(0.05)
    seen.append("batch")
    with lock.released():
        thread.join(PATIENCE_S)
    seen.append("next batch")
    assert seen == ["batch", "command", "next batch"]
    lock.release()


def test_a_scheduler_that_is_busy_lets_a_waiting_command_in() -> None:
    lock, is_over, seen = EngineLock(), threading.Event(), []
    started = threading.Event()

    def schedule() -> None:
        lock.acquire()
        started.set()
        while not is_over.is_set():
            with lock.released():
                pass
        lock.release()

    scheduler = threading.Thread(target=schedule)
    scheduler.start()
    assert started.wait(PATIENCE_S)
    for number in range(20):
        command = threading.Thread(target=lambda number=number: lock.acquire() or seen.append(number) or lock.release())
        command.start()
        command.join(PATIENCE_S)
    is_over.set()
    scheduler.join(PATIENCE_S)
    assert seen == list(range(20)) and not scheduler.is_alive()
