"""A command that comes straight from the front runs when the scheduler waits for requests, and never beside it."""

from __future__ import annotations

import threading

from tasuki.rollout.turn import Turn

PATIENCE_S = 10


def test_a_command_waits_until_the_turn_is_lent_and_the_scheduler_until_the_command_is_done() -> None:
    turn, asked, seen = Turn(), threading.Event(), []
    turn.take()

    def command() -> None:
        asked.set()
        with turn.taken():
            seen.append("command")

    thread = threading.Thread(target=command)
    thread.start()
    assert asked.wait(PATIENCE_S)
    thread.join(0.05)
    seen.append("batch")
    with turn.lent():
        thread.join(PATIENCE_S)
    seen.append("next batch")
    assert seen == ["batch", "command", "next batch"]
    turn.let_go()


def test_a_scheduler_that_is_busy_lets_a_waiting_command_in() -> None:
    turn, is_over, seen = Turn(), threading.Event(), []
    started = threading.Event()

    def schedule() -> None:
        turn.take()
        started.set()
        while not is_over.is_set():
            with turn.lent():
                pass
        turn.let_go()

    scheduler = threading.Thread(target=schedule)
    scheduler.start()
    assert started.wait(PATIENCE_S)
    for number in range(20):
        command = threading.Thread(target=lambda number=number: turn.take() or seen.append(number) or turn.let_go())
        command.start()
        command.join(PATIENCE_S)
    is_over.set()
    scheduler.join(PATIENCE_S)
    assert seen == list(range(20)) and not scheduler.is_alive()
