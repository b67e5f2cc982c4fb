"""Rank processes of the sync benchmarks, which read commands as lines and answer in lines of JSON."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from tasuki.v1 import weights_pb2
from tools.bench.processes import REPOSITORY, tied

ANSWER_TIMEOUT_S = 300.0
"""Timeout for all answers to one line, long enough for an engine's start and for the first round of a 32B model."""


def answer(**facts: Any) -> None:
    if "handle" in facts:
        facts["handle"] = facts["handle"].SerializeToString().hex()
    print(json.dumps(facts), flush=True)


class Ranks:
    """Processes that answer each line with a line, and end with this process.

    If one ends early or does not answer in time, the program ends too and names it.
    """

    def __init__(self, module: str, commands: Sequence[Sequence[str]]) -> None:
        start = [sys.executable, "-m", module]
        self._names = [" ".join([module, *command]) for command in commands]
        self._ranks = [
            subprocess.Popen(tied([*start, *command]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
            for command in commands
        ]

    def ask(self, line: str) -> list[dict[str, Any]]:
        self.tell(line)
        return self.hear()

    def tell(self, line: str) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            # `hear` reports a process that has ended.
            with suppress(BrokenPipeError):
                rank.stdin.write(line + "\n")
                rank.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        lines = [b""] * len(self._ranks)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        # Read in any order: a rank may be waiting for another that has ended.
        with selectors.DefaultSelector() as pending:
            for index, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                pending.register(rank.stdout, selectors.EVENT_READ, index)
            while waiting := sorted(key.data for key in pending.get_map().values()):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    names = ", ".join(self._names[index] for index in waiting)
                    self._end(f"no answer in {ANSWER_TIMEOUT_S:g} s from {names}")
                for key, _ in pending.select(left_s):
                    lines[key.data] += self._read(key.data)
                    if lines[key.data].endswith(b"\n"):
                        pending.unregister(key.fileobj)
        return [json.loads(line) for line in lines]

    def _read(self, index: int) -> bytes:
        rank = self._ranks[index]
        assert rank.stdout is not None
        part = os.read(rank.stdout.fileno(), 1 << 20)
        if not part:
            self._end(f"{self._names[index]} ended with exit code {rank.wait()}")
        return part

    def _end(self, reason: str) -> NoReturn:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        raise SystemExit(reason)

    def close(self) -> None:
        """Closes all inputs before waiting for any process: ranks may wait for each other at their end."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            assert rank.stdout is not None
            with rank.stdout as rest:
                rest.read()
            rank.wait()


def published_weights(answers: Sequence[dict[str, Any]], version: int) -> weights_pb2.PublishedWeights:
    handles = [weights_pb2.WeightHandle.FromString(bytes.fromhex(one["handle"])) for one in answers]
    return weights_pb2.PublishedWeights(policy_version=version, boot_id="bench", handles=handles)
