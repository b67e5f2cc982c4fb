"""A path that the user has no permission for is reported as such, with the user and the folder to change."""

import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.doctor.host import check_disk
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import PathPermissionDenied
from tests.models import make_model, save_checkpoint
from tests.sockets import NOBODY

# Before a test drops root, which may own a checkout that is closed to others.
for _name in ("cli.audit", "cli.certs", "cli.plan", "cli.train", "dashboard.server", "trackers.sending", "node.start"):
    import_module(f"tasuki.{_name}")
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


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A node's folder that everybody can enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="tasuki-denied-"))
    save_checkpoint(make_model("llama_tied", seed=0), path / "model")
    (path / "node.toml").write_text(NODE)
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


def error_of(*arguments: str | Path) -> str:
    """Runs a command as a user without permissions; returns its last line of errors."""
    errors = io.StringIO()
    try:
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        with redirect_stderr(errors):
            assert main([*map(str, arguments)]) == 2
    finally:
        os.seteuid(os.getuid())
    return errors.getvalue().splitlines()[-1]


UP, TRAIN, PLAN = ("up", "node.toml"), ("train", "node.toml"), ("plan", "node.toml", "--gpu-gb", "80")


@pytest.mark.parametrize(
    ("closed", "command", "named"),
    [
        ("node.toml", UP, "config: node.toml"),
        ("node.toml", ("audit", "node.toml"), "config: node.toml"),
        ("model", UP, "model.path: {folder}/model/config.json"),
        ("model/model.safetensors", UP, "model.path: {folder}/model/model.safetensors"),
        ("model/tokenizer.json", TRAIN, "model.path: {folder}/model/tokenizer.json"),
        ("model", PLAN, "model.path: {folder}/model"),
        ("model/config.json", ("plan", "model", "--gpu-gb", "80"), "model: model/config.json"),
        ("data/train.jsonl", TRAIN, "train.dataset: {folder}/data/train.jsonl"),
        ("journal", ("audit", "journal/journal.sqlite"), "journal/journal.sqlite"),
        ("journal/journal.sqlite", ("audit", "journal"), "journal: journal/journal.sqlite"),
        ("empty", ("certs", "empty/lab"), "folder: empty/lab"),
        ("empty", ("track", "empty/run", "--to", "tensorboard"), "empty/run"),
        ("empty", ("dashboard", "empty"), "empty"),
        ("journal", ("dashboard", "--config", "closed.toml"), "{folder}/journal/"),
    ],
    indirect=["closed"],
)
def test_a_command_names_the_path_the_user_and_what_to_change(
    folder: Path, closed: Path, command: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    line = error_of(*command)
    assert line.startswith(f"tasuki: error PATH_PERMISSION_DENIED: {named.format(folder=folder)}"), line
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    assert "permission denied for user " in line and f"uid {uid}" in line
    assert line.endswith(f"; change the mode or owner of {closed}, or run as another user")
    assert not (folder / "state").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a folder immutable")
def test_root_is_told_what_stops_it(tmp_path: Path) -> None:
    done = subprocess.run(["chattr", "+i", tmp_path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this file system has no attributes")
    try:
        with pytest.raises(PathPermissionDenied) as caught, named_if_denied(tmp_path):
            (tmp_path / "file").write_text("")
        finding = check_disk("state_dir", tmp_path / "state", needed_bytes=1)
    finally:
        subprocess.run(["chattr", "-i", tmp_path], check=True)
    for text in (caught.value.message, finding.advice):
        assert f"{tmp_path} has been made immutable" in text and "another user" not in text
