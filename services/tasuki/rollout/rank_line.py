"""An engine rank's line to the front: all its answers go out there, and commands that wait for no batch come in there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq


def line_identity(rank: int) -> bytes:
    """By which the front addresses a rank."""
    return f"rank-{rank}".encode()


class RankLine:
    """Owns the socket and the thread that reads it, until `close`.

    run: carries out a command from the front, in that thread.
    """

    def __init__(self, address: str, *, rank: int, run: Callable[[bytes], bytes]) -> None:
        self.address = address
        self._run = run
        context = zmq.Context.instance()
        self._front = context.socket(zmq.DEALER)
        self._front.setsockopt(zmq.ROUTING_ID, line_identity(rank))
        # The front has gone when nobody takes an answer; then this process is about to go, too.
        self._front.setsockopt(zmq.LINGER, 5000)
        self._front.connect(address)
        # A socket belongs to one thread: what the scheduler's has to say goes through a pair of them.
        self._said, self._heard = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._heard.bind(f"inproc://{id(self)}")
        self._said.connect(f"inproc://{id(self)}")
        self._thread = threading.Thread(target=self._serve, name="front-line", daemon=True)
        self._thread.start()

    def send(self, answer: bytes) -> None:
        """From the thread that made this line."""
        self._said.send(answer)

    def close(self) -> None:
        self._said.send(b"")
        self._thread.join()
        self._said.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._front, self._heard):
            poller.register(socket, zmq.POLLIN)
        is_open = True
        while is_open:
            ready = dict(poller.poll())
            if self._heard in ready:
                answer = self._heard.recv()
                is_open = bool(answer)
                if is_open:
                    self._front.send(answer)
            if is_open and self._front in ready:
                self._front.send(self._run(self._front.recv()))
        self._front.close()
        self._heard.close()
