"""Our files and functions between Acquire and the unmap of a changeover, recorded on a small CPU node.

    python -m tools.bench.changeover_path

Starts a node and changes over twice. For OFFLOAD in the trainer and PAUSE_KV in rollout it prints every function that is open on the way
to the native library. Left out: gRPC, asyncio, SGLang, generated code, and functions that have been running since their process started.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

from tasuki.client import Client, Phase
from tests import conftest

_STARTS = (
    "/__main__.py:",
    "/serve.py:",
    "/launch.py:",
    "/forked_rank.py:",
    "rollout/ranks.py:",
    "/scheduler.py:",
    "/rank_line.py:",
)
_TO_SERVICE = [("task", "CoordinatorServicer.Acquire", "coordinator/"), ("rpc Pause", "", "coordinator/")]
_WAYS = {
    "OFFLOAD": [
        *_TO_SERVICE,
        ("task", "Servicer.Pause", "trainer/"),
        ("ranks", "Servicer.Pause.<locals>.pause", "trainer/"),
        ("pages pause", "ause", "trainer/"),
    ],
    "PAUSE_KV": [
        *_TO_SERVICE,
        ("task", "Servicer.Pause", "rollout/"),
        ("ranks", ":Rollout.pause", "rollout/"),
        ("pages pause", ":EngineRank.run_at_once", "rollout/"),
    ],
}
"""Legs of each stage's path, from one hand-over of a call to the next: its kind, and a function and a folder open in it."""


def main() -> None:
    for stage, functions in measured_paths().items():
        print(f"{stage}: {len(files_of(functions))} files, {len(functions)} functions")
        for function in functions:
            print(f"  {function}")


def measured_paths() -> dict[str, list[str]]:
    """Starts a node and returns, for each stage, the functions `file:name` that its changeover passes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(f"from tools.bench.call_stacks import follow\n\nfollow({folder!r})\n")
        paths = (folder, str(conftest.ROOT), conftest.ENVIRONMENT["PYTHONPATH"])
        with (
            mock.patch.dict(conftest.ENVIRONMENT, PYTHONPATH=os.pathsep.join(paths)),
            conftest.started_node() as node,
            Client(state_dir=node.state_dir) as client,
        ):
            for phase in (Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT, Phase.TRAIN):
                client.acquire(phase)
        stacks = [line.split(" > ") for path in Path(folder).glob("*.stacks") for line in path.read_text().splitlines()]
    return {stage: path_of(stacks, legs) for stage, legs in _WAYS.items()}


def files_of(functions: list[str]) -> list[str]:
    """Returns each file once, in the order of the path."""
    return list(dict.fromkeys(function.partition(":")[0] for function in functions))


def path_of(stacks: list[list[str]], legs: list[tuple[str, str, str]]) -> list[str]:
    """Returns each function once, in the order of the path. Raises LookupError for a leg that no process took."""
    found: dict[str, None] = {}
    for kind, function, folder in legs:
        ways = [
            way
            for head, *functions in stacks
            if head.startswith(kind)
            and (
                way := [
                    each for each in functions if not any(start in each for start in _STARTS) and not each.endswith(":run_rank")
                ]
            )
            and any(function in each for each in way)
            and any(each.startswith(folder) for each in way)
        ]
        if not ways:
            raise LookupError(f"no call of kind {kind!r} with {function!r} open in {folder}")
        for way in ways:
            found |= dict.fromkeys(way)
    return list(found)


if __name__ == "__main__":
    main()
