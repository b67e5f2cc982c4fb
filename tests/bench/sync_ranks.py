"""Processes of the sync benchmarks, one a rank, that are told what to do in lines and answer in lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasuki.v1 import weights_pb2

REPOSITORY = Path(__file__).resolve().parents[2]


def answer(**facts: Any) -> None:
    if "handle" in facts:
        facts["handle"] = facts["handle"].SerializeToString().hex()
    print(json.dumps(facts), flush=True)


class Ranks:
    """Processes that answer each line they get with one."""

    def __init__(self, module: str, commands: Sequence[Sequence[str]]) -> None:
        start = [sys.executable, "-m", module]
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
            rank.stdin.write(line + "\n")
            rank.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        return [json.loads(rank.stdout.readline()) for rank in self._ranks if rank.stdout is not None]

    def close(self) -> None:
        for rank in self._ranks:
            rank.communicate()


def published_weights(answers: Sequence[dict[str, Any]], version: int) -> weights_pb2.PublishedWeights:
    handles = [weights_pb2.WeightHandle.FromString(bytes.fromhex(one["handle"])) for one in answers]
    return weights_pb2.PublishedWeights(policy_version=version, boot_id="bench", handles=handles)
