"""The command line: a user's mistake gives one line and exit code 2, before any process starts."""

import contextlib
import json
import subprocess
from pathlib import Path

import pytest

from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.node.exit_report import write_exit_report
from tests.conftest import called
from tests.sparse_weights import write_sparse_weights
from tests.unit.memory_folder import write_tokenizer


def tasuki(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    with contextlib.chdir(cwd):
        return called(*arguments)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node.toml").write_text('state_dir = "state"\n[model]\npath = "model"\n')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SIZES}))
    write_sparse_weights(model)
    write_tokenizer(model)
    return tmp_path


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """Returns the one-line error of a user's mistake."""
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_weights_that_cannot_be_read_are_named_with_the_cause_before_anything_starts(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    weights.unlink()
    weights.symlink_to("../blobs/0123")
    line = refusal(tasuki("up", "node.toml", cwd=folder))
    assert f"{weights} cannot be read" in line
    assert "(No such file or directory)" in line
    assert not (folder / "state").exists()


def test_folder_with_files_of_somebody_elses_is_refused_and_left_as_it_is(folder: Path) -> None:
    (folder / "state" / "run").mkdir(parents=True)
    (folder / "state" / "run" / "mine.txt").write_text("mine")
    line = refusal(tasuki("up", "node.toml", cwd=folder))
    assert line.startswith("tasuki: error INVALID_ARGUMENT: state_dir:")
    assert [path.name for path in (folder / "state").rglob("*")] == ["run", "mine.txt"]


def test_second_node_on_the_state_folder_is_refused_and_names_the_pid(folder: Path) -> None:
    with StateLock.take(folder / "state", name=NODE_LOCK) as lock:
        lock.sign(4242)
        line = refusal(tasuki("up", "node.toml", cwd=folder))
    assert line.startswith("tasuki: error NODE_RUNNING: pid 4242 already runs a node on")


def test_state_says_why_the_last_node_ended(folder: Path) -> None:
    (folder / "state").mkdir()
    write_exit_report(
        folder / "state",
        reason="rollout ended by itself",
        first="rollout",
        exit_codes={"rollout": -9, "trainer": 1, "coordinator": 0},
    )
    line = refusal(tasuki("state", "node.toml", cwd=folder))
    assert "because rollout ended by itself (signal SIGKILL), see" in line
    assert "logs/rollout.log; start one with: tasuki up CONFIG (up --resume goes on where it ended)" in line
    # Exit code 1 of a service that was told to stop is not a failure.
    ended = json.loads((folder / "state" / "exit.json").read_text())["services"]
    assert ended == {"rollout": {"signal": "SIGKILL"}, "trainer": {"stopped": True}, "coordinator": {"stopped": True}}
    write_exit_report(folder / "state", reason="asked by SIGTERM", first=None, exit_codes={"trainer": 1, "rollout": -15})
    ended = json.loads((folder / "state" / "exit.json").read_text())["services"]
    assert ended == {"trainer": {"stopped": True}, "rollout": {"stopped": True}}, "still imports when it is told to end"
    assert "because" not in refusal(tasuki("state", "node.toml", cwd=folder))


def test_service_that_ends_while_it_starts_is_shown_with_its_words_and_the_others_are_stopped(folder: Path) -> None:
    result = tasuki("up", "node.toml", "--set", "coordinator.stage_timeout_s=1", cwd=folder)
    assert result.returncode != 0
    assert (
        "tasuki: error DEADLINE_EXCEEDED: rollout: the engine did not start within coordinator.stage_timeout_s = 1 s"
        in result.stderr
    )
    ended = json.loads((folder / "state" / "exit.json").read_text())
    assert ended["first"] == "rollout"
    StateLock.take(folder / "state", name=NODE_LOCK).close()
