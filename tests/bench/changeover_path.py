"""What a changeover passes between Acquire and the unmap: our files and functions, of a small node on a CPU.

    python -m tests.bench.changeover_path

Starts a node, changes over twice, and prints for OFFLOAD in the trainer and PAUSE_KV in rollout every function whose call is open on the
way to the native library. gRPC, asyncio, SGLang and generated code are left out, and what has run since a process started.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tasuki.client import Client, Phase
from tests import conftest

_STARTS = ("/__main__.py:", "/serve.py:", "/launch.py:", "/forked_rank.py:", "rollout/ranks.py:", "/scheduler.py:")
_WAYS = {"OFFLOAD": "trainer/", "PAUSE_KV": "rollout/"}
"""Stage -> where its service is."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(f"from tests.bench.call_stacks import follow\n\nfollow({folder!r})\n")
        paths = (folder, str(conftest.ROOT), conftest.ENVIRONMENT["PYTHONPATH"])
        conftest.ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(paths)
        with conftest.started_node() as node, Client(state_dir=node.state_dir) as client:
            for phase in (Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT, Phase.TRAIN):
                client.acquire(phase)
        stacks = [line.split(" > ") for path in Path(folder).glob("*.stacks") for line in path.read_text().splitlines()]
    for stage, service in _WAYS.items():
        functions = path_of(stacks, service)
        files = dict.fromkeys(function.partition(":")[0] for function in functions)
        print(f"{stage}: {len(files)} files, {len(functions)} functions")
        for function in functions:
            print(f"  {function}")


def path_of(stacks: list[list[str]], service: str) -> list[str]:
    """Every function once, in the order of the way. service: the folder of the one that gives pages back."""
    legs = [
        ("task", "CoordinatorServicer.Acquire", "coordinator/"),
        ("rpc Pause", "", "coordinator/"),
        ("task", "Servicer.Pause", service),
        ("", "Servicer.Pause.<locals>.pause", service),
        ("ranks", ":RolloutEngine.run_on_ranks", service),
        ("pages pause", "ause", service),
    ]
    found: dict[str, None] = {}
    for kind, function, folder in legs:
        for head, *functions in stacks:
            way = [each for each in functions if not any(start in each for start in _STARTS) and not each.endswith(":run_rank")]
            if head.startswith(kind) and any(function in each for each in way) and any(each.startswith(folder) for each in way):
                found |= dict.fromkeys(way)
    return list(found)


if __name__ == "__main__":
    main()
