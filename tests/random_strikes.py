"""Signals to random processes of a running node at random times, drawn from a seed."""

import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from tests.chaos_node import ChaosNode
from tests.integration.node_process import is_alive

PROCESSES = ("coordinator", "trainer0", "trainer1", "rollout", "scheduler0")
"""Processes by heartbeat name; trainer0 also runs the trainer's front."""
_KINDS = tuple(product(PROCESSES, (signal.SIGKILL, signal.SIGSTOP)))
_EACH, _NUM_AGAIN = 3, 6
# A round of two changeovers takes about _ROUND_S, the restart of an engine a multiple of _RECOVERY_S.
_ROUND_S, _RECOVERY_S = 0.5, 15.0
_QUIET_ROUNDS = 10
_STARTS_WITHIN_S = 240.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal to send. delay_s: after the round begins or, if later, after the previous strike."""

    round: int
    delay_s: float
    process: str
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class Struck:
    """A signal that was sent. during: the client's activity at the time."""

    strike: Strike
    round: int
    during: str
    pid: int
    seconds: float
    """Seconds since the first round."""

    def told(self) -> str:
        strike = self.strike
        return f"{self.seconds:.1f} s round {self.round}: {strike.signal.name} {strike.process} {self.pid} during {self.during}"


def draw_strikes(seed: int, *, num_rounds: int) -> list[Strike]:
    """Draws each signal three times for each process, in separate rounds; some rounds add another strike before the node has recovered."""
    random = Random(seed)
    kinds = random.sample(_KINDS * _EACH, len(_KINDS) * _EACH)
    rounds = sorted(random.sample(range(_QUIET_ROUNDS, num_rounds - _QUIET_ROUNDS), len(kinds)))
    again = set(random.sample(rounds, _NUM_AGAIN))
    strikes: list[Strike] = []
    for number, kind in zip(rounds, kinds, strict=True):
        strikes.append(Strike(number, random.uniform(0, _ROUND_S), *kind))
        if number in again:
            strikes.append(Strike(number, random.uniform(0, _RECOVERY_S), *random.choice(_KINDS)))
    return strikes


class Striker:
    """Sends strikes from a thread while a client runs its rounds."""

    def __init__(self, chaos: ChaosNode, strikes: Sequence[Strike]) -> None:
        self._chaos = chaos
        self._round, self._changed = -1, threading.Condition()
        self._failure: Exception | None = None
        self._started = time.monotonic()
        self.during = ""
        self.struck: list[Struck] = []
        self._thread = threading.Thread(target=self._run, args=(strikes,), name="striker", daemon=True)
        self._thread.start()

    def begin(self, number: int) -> None:
        """Marks the round as begun by the client."""
        with self._changed:
            self._round = number
            self._changed.notify()

    def end(self) -> None:
        """Waits for the last strike. Raises the error that prevented one."""
        self.begin(2**31)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self, strikes: Iterable[Strike]) -> None:
        try:
            for strike in strikes:
                with self._changed:
                    self._changed.wait_for(lambda at=strike.round: self._round >= at)
                time.sleep(strike.delay_s)
                self._make(strike)
        except Exception as failure:  # noqa: BLE001 - raised again by `end`
            self._failure = failure

    def _make(self, strike: Strike) -> None:
        """Strikes the process as soon as it is alive; it may still be restarting."""
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while True:
            for pid in filter(is_alive, self._chaos.pids(strike.process)):
                seconds = round(time.monotonic() - self._started, 3)
                self.struck.append(Struck(strike, self._round, self.during, pid, seconds))
                os.kill(pid, strike.signal)
                return
            assert time.monotonic() < deadline, f"{strike.process} does not start again"
            time.sleep(_POLL_S)
