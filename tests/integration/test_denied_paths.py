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

# Imports before it drops root, which may own a checkout that is closed to others.
COMMAND = f"""
import os, sys
import tasuki.cli.audit, tasuki.cli.certs, tasuki.dashboard.command, tasuki.cli.doctor, tasuki.cli.plan, tasuki.trackers.sending
import tasuki.cli.train, tasuki.supervisor.node, tasuki.supervisor.post_mortem
from tasuki.cli.__main__ import main
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
sys.exit(main())
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


def error_of(*arguments: str | Path, cwd: Path) -> str:
    argv = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    done = subprocess.run(argv, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr.splitlines()[-1]


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
    folder: Path, closed: Path, command: tuple[str, ...], named: str
) -> None:
    line = error_of(*command, cwd=folder)
    assert line.startswith(f"tasuki: error PATH_PERMISSION_DENIED: {named.format(folder=folder)}"), line
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    assert "permission denied for user " in line and f"uid {uid}" in line
    assert line.endswith(f"; change the mode or owner of {closed}, or run as another user")
    assert not (folder / "state").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="the user may write to its own folder")
def test_a_folder_that_cannot_be_created_is_denied_by_its_parent(folder: Path) -> None:
    line = error_of(*UP, cwd=folder)
    assert line.startswith(f"tasuki: error PATH_PERMISSION_DENIED: state_dir: {folder}/state: "), line
    assert line.endswith(f"; change the mode or owner of {folder}, or run as another user")


@pytest.mark.parametrize("closed", ["data"], indirect=True)
def test_doctor_reports_it_and_goes_on(folder: Path, closed: Path) -> None:
    argv = [sys.executable, "-c", COMMAND, "doctor", "--json", "sft.toml"]
    done = subprocess.run(argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    found = {finding["name"]: finding["found"] for finding in json.loads(done.stdout)}
    assert found["data of [sft]"].startswith(f"PATH_PERMISSION_DENIED: sft.dataset: {closed}/train.jsonl: permission denied")
    assert "disk of sft.output_dir" in found


@pytest.mark.parametrize("closed", ["journal"], indirect=True)
def test_doctor_reports_a_closed_state_folder_and_goes_on(folder: Path, closed: Path) -> None:
    argv = [sys.executable, "-c", COMMAND, "doctor", "--json", "sft.toml", "--set", f"state_dir={closed}"]
    done = subprocess.run(argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    found = {finding["name"]: finding["found"] for finding in json.loads(done.stdout)}
    assert found["state_dir"].startswith("PATH_PERMISSION_DENIED: ") and f"{closed}/node.lock" in found["state_dir"]
    assert "disk of sft.output_dir" in found


def test_a_missing_path_is_still_not_found(folder: Path) -> None:
    line = error_of("plan", "nowhere.toml", cwd=folder)
    assert line == "tasuki: error PATH_NOT_FOUND: config nowhere.toml does not exist"
