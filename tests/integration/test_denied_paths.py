"""A path that the user has no permission for is reported as such, with the user and the folder to change."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT
from tests.models import make_model, save_checkpoint
from tests.sockets import NOBODY

# Imports once, before it drops root, which may own a checkout that is closed to others. Each command is a fork.
COMMANDS = f"""
import json, os, sys
import tasuki.cli.audit, tasuki.cli.certs, tasuki.dashboard.server, tasuki.cli.doctor, tasuki.cli.plan, tasuki.trackers.sending
import tasuki.cli.train, tasuki.node.start, tasuki.node.exit_report
from tasuki.cli.__main__ import main
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
for line in sys.stdin:
    command = os.fork()
    if command == 0:
        argv, *streams = json.loads(line)
        for fd, path in zip((1, 2), streams):
            os.dup2(os.open(path, os.O_WRONLY), fd)
        code = 1
        try:
            code = main(argv)
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]), flush=True)
"""
NODE = """
state_dir = "state"
device = "cpu"
[model]
path = "model"
[train]
dataset = "data/train.jsonl"
output_dir = "run"
reward.function = "rewards:reward"
"""


# The worker of a reward function would have to import Python's library as another user.
SFT = re.sub(r"(?s)\[train\].*", '[sft]\ndataset = "data/train.jsonl"\noutput_dir = "run"\n', NODE)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A node's folder that everybody can enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="tasuki-denied-"))
    save_checkpoint(make_model("llama_tied", seed=0), path / "model")
    (path / "node.toml").write_text(NODE)
    (path / "sft.toml").write_text(SFT)
    (path / "closed.toml").write_text(NODE.replace('"state"', '"journal"'))
    (path / "data").mkdir()
    (path / "data" / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (path / "journal").mkdir()
    (path / "journal" / "journal.sqlite").write_bytes(b"")
    (path / "empty").mkdir()
    for each in (path, *path.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def closed(folder: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The path that a test names, without any permission."""
    path = folder / request.param
    mode = path.stat().st_mode
    path.chmod(0)
    yield path
    path.chmod(mode)


class Nobody:
    """Runs commands in the folder as a user without permissions."""

    def __init__(self, folder: Path, outputs: Path) -> None:
        argv = [sys.executable, "-c", COMMANDS]
        self._process = subprocess.Popen(argv, cwd=folder, env=ENVIRONMENT, stdin=-1, stdout=-1, text=True)
        self._outputs = [outputs / "stdout", outputs / "stderr"]

    def run(self, *arguments: str | Path) -> tuple[int, str, str]:
        """Returns exit code, output and errors."""
        for path in self._outputs:
            path.write_text("")
            path.chmod(0o666)
        self._process.stdin.write(json.dumps([[*map(str, arguments)], *map(str, self._outputs)]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        output, errors = (path.read_text() for path in self._outputs)
        return code, output, errors

    def error_of(self, *arguments: str | Path) -> str:
        code, output, errors = self.run(*arguments)
        assert code == 2, output + errors
        return errors.splitlines()[-1]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def nobody(folder: Path) -> Iterator[Nobody]:
    with tempfile.TemporaryDirectory(prefix="tasuki-outputs-") as outputs:
        Path(outputs).chmod(0o755)
        nobody = Nobody(folder, Path(outputs))
        yield nobody
        nobody.close()


UP, TRAIN, PLAN = ("up", "node.toml"), ("train", "node.toml"), ("plan", "node.toml", "--gpu-gb", "80")


@pytest.mark.parametrize(
    ("closed", "command", "named"),
    [
        ("node.toml", UP, "config: node.toml"),
        ("node.toml", ("audit", "node.toml"), "config: node.toml"),
        ("model", UP, "model.path: {folder}/model/config.json"),
        ("model/model.safetensors", UP, "model.path: {folder}/model/model.safetensors"),
        ("model/tokenizer.json", TRAIN, "model.path: {folder}/model/tokenizer.json"),
        ("model", PLAN, "model: {folder}/model/config.json"),
        ("model/config.json", ("plan", "model", "--gpu-gb", "80"), "model: model/config.json"),
        ("data/train.jsonl", TRAIN, "train.dataset: {folder}/data/train.jsonl"),
        ("journal", ("audit", "journal/journal.sqlite"), "journal/journal.sqlite"),
        ("journal/journal.sqlite", ("audit", "journal"), "journal: journal/journal.sqlite"),
        ("empty", ("certs", "empty/lab"), "folder: empty/lab"),
        ("empty", ("track", "empty/run", "--to", "tensorboard"), "empty/run/metrics.jsonl"),
        ("empty", ("dashboard", "empty"), "empty"),
        ("journal", ("dashboard", "--config", "closed.toml"), "{folder}/journal/"),
    ],
    indirect=["closed"],
)
def test_a_command_names_the_path_the_user_and_what_to_change(
    folder: Path, nobody: Nobody, closed: Path, command: tuple[str, ...], named: str
) -> None:
    line = nobody.error_of(*command)
    assert line.startswith(f"tasuki: error PATH_PERMISSION_DENIED: {named.format(folder=folder)}"), line
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    assert "permission denied for user " in line and f"uid {uid}" in line
    assert line.endswith(f"; change the mode or owner of {closed}, or run as another user")
    assert not (folder / "state").exists()
