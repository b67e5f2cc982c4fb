"""Processes of the sync benchmarks, one a rank, that are told what to do in lines and answer in lines of JSON."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasuki.v1 import weights_pb2

REPOSITORY = Path(__file__).resolve().parents[2]


def answer(**facts: Any) -> None:
    if "handle" in facts:
        facts["handle"] = facts["handle"].SerializeToString().hex()
    print(json.dumps(facts), flush=True)


class Ranks:
    """Processes that answer each line they get with one. When one of them ends before its time, so does the program, naming it."""

    def __init__(self, module: str, commands: Sequence[Sequence[str]]) -> None:
        start = [sys.executable, "-m", module]
        self._names = [" ".join([module, *command]) for command in commands]
        self._ranks = [
            subprocess.Popen([*start, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
            for command in commands
        ]

    def ask(self, line: str) -> list[dict[str, Any]]:
        self.tell(line)
        return self.hear()

    def tell(self, line: str) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            # What has ended shows in `hear`.
            with suppress(BrokenPipeError):
                rank.stdin.write(line + "\n")
                rank.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        lines: dict[int, str] = {}
        # Whichever comes first: a rank may wait for another one that has ended.
        with selectors.DefaultSelector() as pending:
            for index, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                pending.register(rank.stdout, selectors.EVENT_READ, index)
            while pending.get_map():
                for key, _ in pending.select():
                    lines[key.data] = self._line_of(key.data)
                    pending.unregister(key.fileobj)
        return [json.loads(lines[index]) for index in range(len(self._ranks))]

    def _line_of(self, index: int) -> str:
        rank = self._ranks[index]
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if line:
            return line
        status = rank.wait()
        for other in self._ranks:
            other.kill()
            other.wait()
        raise SystemExit(f"{self._names[index]} ended with exit code {status}")

    def close(self) -> None:
        """Ends all input before it waits for any: ranks may wait for each other at their end."""
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
