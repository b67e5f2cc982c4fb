"""How many of our files one reads to follow one thing, with limits: `python -m tools.walks`.

Changeover and weight are traced on a small CPU node: the functions open in each process when a call is handed to a task, a peer, a rank or
the native library, from Acquire to the unmap of PAUSE_KV and OFFLOAD, and from PublishWeights to the copy into the engine's parameter.
Left out: gRPC, the interceptors around every call, asyncio, SGLang, generated code, channels of the wire, and functions that run since
their process started.
The other walks are the files that name a setting.
"""

import argparse
import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
_STARTS = (
    "/__main__.py:",
    "rpc/interceptors.py:",
    "/serve.py:",
    "/launch.py:",
    "/forked_rank.py:",
    "rollout/ranks.py:",
    "/scheduler.py:",
    "RankLine.",
    ":run_rank",
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
        ("pages pause", ":EngineRank.run", "rollout/"),
    ],
    "weight": [
        ("rpc PublishWeights", "", "coordinator/"),
        ("ranks", "TrainerServicer._publish", "trainer/"),
        ("published", "publish", "trainer/"),
        ("rpc ReceiveWeights", "", "coordinator/"),
        ("ranks", ":Rollout.receive", "rollout/"),
        ("pages copy_and_sum", "receive", "rollout/"),
    ],
}
"""Legs of each path, from one hand-over of a call to the next: its kind, and a function and a folder open in it."""
_ON_THE_WAY = ("services/tasuki/config", "client", "services/tasuki/rollout")
_NAMED = {
    "temperature": ("temperature", _ON_THE_WAY),
    "a loss setting": ("clip_high", ("services", "client")),
    "a key": ("drain_grace_s", ("services", "client")),
}
"""A setting, and the folders that it passes."""
LIMITS = {
    "OFFLOAD": 8,
    "PAUSE_KV": 8,
    "weight": 20,
    "temperature": 8,
    "a loss setting": 5,
    "a key": 3,
    "forms of temperature": 3,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.walks", description="Counts the files of each walk.")
    parser.add_argument("--named", action="store_true", help="only the walks that need no node")
    is_quick = parser.parse_args().named
    walks = {} if is_quick else measured_paths()
    found = {name: files_of(functions) for name, functions in walks.items()}
    found |= {name: list(naming(*setting)) for name, setting in _NAMED.items()}
    found["forms of temperature"] = list(forms("temperature", _ON_THE_WAY))
    for name, files in found.items():
        print(f"{name}: {len(files)}, at most {LIMITS[name]}")
        for each in walks.get(name, files):
            print(f"  {each}")
    return any(len(files) > LIMITS[name] for name, files in found.items())


def naming(word: str, folders: tuple[str, ...]) -> Iterator[str]:
    """Yields our files that name a setting."""
    for path in _python_files(folders):
        if re.search(rf"\b{word}\b", path.read_text()):
            yield str(path.relative_to(ROOT))


def forms(name: str, folders: tuple[str, ...]) -> Iterator[str]:
    """Yields the classes with a field of this name; generated messages count once."""
    for path in _python_files(folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == name for field in node.body
            ):
                yield f"{path.relative_to(ROOT)}:{node.name}"
    yield "the protos"


def _python_files(folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if not path.is_symlink())


def measured_paths() -> dict[str, list[str]]:
    """Starts a node and returns, for each path, the functions `file:name` that its changeover passes."""
    from tasuki.client import Client, Phase
    from tests import conftest

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(f"from tools.call_stacks import follow\n\nfollow({folder!r})\n")
        paths = (folder, str(conftest.ROOT), conftest.ENVIRONMENT["PYTHONPATH"])
        with (
            mock.patch.dict(conftest.ENVIRONMENT, PYTHONPATH=os.pathsep.join(paths)),
            conftest.started_node() as node,
            Client(state_dir=node.state_dir) as client,
        ):
            for phase in (Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT, Phase.TRAIN):
                client.acquire(phase)
        stacks = [line.split(" > ") for path in Path(folder).glob("*.stacks") for line in path.read_text().splitlines()]
    return {name: path_of(stacks, legs) for name, legs in _WAYS.items()}


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
            and (way := [each for each in functions if not any(start in each for start in _STARTS)])
            and any(function in each for each in way)
            and any(each.startswith(folder) for each in way)
        ]
        if not ways:
            known = "\n".join(" > ".join(stack) for stack in stacks if stack[0].startswith(kind))
            raise LookupError(f"no call of kind {kind!r} with {function!r} open in {folder}, but\n{known}")
        for way in ways:
            found |= dict.fromkeys(way)
    return list(found)


if __name__ == "__main__":
    sys.exit(main())
