"""The command line: a user's mistake gives one line and exit code 2, before any process starts; and what commands print."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tasuki.cli.__main__ import main
from tasuki.cli.arguments import config_file
from tasuki.cli.node_view import draw, print_text
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.paths import node_targets
from tasuki.config.schema import NodeConfig
from tasuki.node import node_snapshot
from tasuki.node.exit_report import write_exit_report
from tasuki.node.node_snapshot import NodeReader, NodeSnapshot, as_dict
from tasuki.v1 import coordinator_pb2, memory_pb2, rollout_pb2, trainer_pb2, types_pb2
from tests.conftest import ENVIRONMENT, called
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


PLAN = [sys.executable, "-m", "tasuki.cli", "plan", "--preset", "balanced"]


def test_an_error_shows_control_characters_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.toml"
    file.write_text('state_dir = "s"\n"\\u001b[31mevil\\u0007\\u009b" = 1\n[model]\npath = "m"\n')
    assert main(["up", str(file)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tasuki: error INVALID_ARGUMENT") and r"\x1b[31mevil\x07\x9b" in told
    assert all(char.isprintable() or char == "\n" for char in told)


def snapshot_of(node: coordinator_pb2.NodeState) -> NodeSnapshot:
    return NodeSnapshot(
        node=node,
        trainer=trainer_pb2.GetTrainerStateResponse(),
        rollout=rollout_pb2.GetRolloutStateResponse(),
        trainer_memory=memory_pb2.GetUsageResponse(),
        rollout_memory=memory_pb2.GetUsageResponse(),
        changeovers=(),
        absent={},
    )


def drawn(snapshot: NodeSnapshot, *, width: int = 200) -> str:
    shown = io.StringIO()
    Console(file=shown, width=width).print(draw(snapshot))
    return shown.getvalue()


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (
            coordinator_pb2.NodeState(last_error="the path /x\x1b]0;evil\x07 \u00e9 exists"),
            "the path /x\\x1b]0;evil\\x07 \u00e9 exists",
        ),
        (coordinator_pb2.NodeState(), "trainer 0, rollout unknown"),
        (coordinator_pb2.NodeState(stage=types_pb2.STAGE_LOAD_TRAINER), "trainer 0, rollout none yet"),
    ],
)
def test_a_nodes_state_escapes_control_characters_and_tells_a_version_where_it_is_known(
    node: coordinator_pb2.NodeState, text: str
) -> None:
    assert text in drawn(snapshot_of(node))


def test_a_nodes_state_has_whole_addresses_and_no_trailing_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {"state_dir": tmp_path / ("long" * 12), "model": {"path": tmp_path}, "listen": "127.0.0.1:50050"}
    config = NodeConfig.model_validate({**tables, "security": {"insecure": True}})
    monkeypatch.setattr(node_snapshot, "holder", lambda folder, name: 1)
    with NodeReader(config) as reader:
        snapshot = replace(reader.read(), absent={}, trainer=trainer_pb2.GetTrainerStateResponse(num_ranks=1))
    target = node_targets(config)["coordinator"]
    for width in (40, 80, 200):
        assert f"{target}and127.0.0.1:50050" in "".join(drawn(snapshot, width=width).split()), "folded, not cut"
    print_text(draw(snapshot))
    lines = capsys.readouterr().out.splitlines()
    assert "trainer         1 rank, 0 parameters" in lines
    assert all(line == line.rstrip() for line in lines)
    ports = zip(node_targets(config).items(), range(50050, 50053), strict=True)
    assert as_dict(snapshot)["addresses"] == {name: f"{target} and 127.0.0.1:{port}" for (name, target), port in ports}


def test_a_nodes_state_names_a_file_that_its_ports_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"state_dir": tmp_path, "model": {"path": tmp_path}, "listen": "127.0.0.1:50050"}
    config = NodeConfig.model_validate({**tables, "security": {"callers": tmp_path / "callers.toml"}})
    monkeypatch.setattr(node_snapshot, "holder", lambda folder, name: 1)
    with NodeReader(config) as reader:
        snapshot = reader.read()
    assert "not reloaded" in drawn(snapshot) and str(tmp_path / "callers.toml") in str(as_dict(snapshot)["files_problem"])


def test_output_without_room_is_an_error_that_names_it() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(PLAN, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    told = "tasuki: error DISK_FULL: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_a_reader_that_has_gone_ends_a_command_in_silence() -> None:
    with subprocess.Popen(
        [*PLAN, "--json"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        command.stdout.close()
        assert command.stderr is not None
        assert (command.stderr.read(), command.wait(timeout=60)) == ("", 1)


@pytest.mark.parametrize("name", ["node.toml", "run.toml", "logs/node.toml"])
def test_a_folder_of_a_node_or_run_stands_for_its_configuration(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    assert config_file(str(tmp_path)) == tmp_path  # a model's folder, for a plan
    (tmp_path / "logs").mkdir()
    (tmp_path / name).write_text(f'state_dir = "{tmp_path / "node"}"\n[model]\npath = "model"\n')
    assert config_file(str(tmp_path)) == tmp_path / name
    assert main(["state", str(tmp_path)]) == 2
    assert f"no node runs on {tmp_path / 'node'}" in capsys.readouterr().err
