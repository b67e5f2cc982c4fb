"""A run found again by its output folder, its node's state folder or its configuration."""

from dataclasses import asdict
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.client.loop_state import LoopState, write_loop_state
from tasuki.client.step import Step
from tasuki.config.load import load_config, save_config
from tasuki.config.paths import RUN_CONFIG, training_output_path
from tasuki.models.folder_files import file_digest
from tasuki.runs.earlier_run import RunHead, find_run, write_head
from tasuki.runs.folder import MetricsFile
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tests.refusal import refusing

CONFIG = """
state_dir = "node"
model.path = "model"
[sft]
dataset = "rows.jsonl"
eval_dataset = "held-out.jsonl"
output_dir = "run"
"""
STEPS = [Step(0, 0, metrics={"eval/loss": 3.0}), Step(1, 1, metrics={"loss": 2.0}), Step(2, 2, metrics={"eval/loss": 1.0})]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node.toml").write_text(CONFIG)
    (tmp_path / "held-out.jsonl").write_text("{}\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "node").mkdir()
    config = load_config(tmp_path / "node.toml")
    recipe = {"sft.eval_dataset": file_digest(tmp_path / "held-out.jsonl")}
    write_head(tmp_path / "run", RunHead("a", 0, recipe, {"folder": "/there", "config_dir": str(tmp_path)}))
    save_config(config, tmp_path / "run" / RUN_CONFIG)
    MetricsFile(tmp_path / "run", STEPS)
    training_output_path(tmp_path / "node").write_text(f"{tmp_path / 'run'}\n")
    return tmp_path


@pytest.mark.parametrize("place", ["run", "node", "node.toml", "moved"])
def test_a_run_is_found_with_its_evaluations(folder: Path, place: str) -> None:
    (folder / "run").rename(folder / "moved") if place == "moved" else None
    found = find_run(folder / place)
    assert found.output_dir == folder / ("moved" if place == "moved" else "run")
    assert found.config.model.path == folder / "model"
    assert folder in found.folders
    last, first = found.evaluated(), found.evaluated(policy_version=0)
    assert last is not None and first is not None
    assert (asdict(last), asdict(first), found.evaluated(policy_version=1)) == (asdict(STEPS[2]), asdict(STEPS[0]), None)
    found.check_data()


def test_an_evaluation_set_that_has_changed_is_refused(folder: Path) -> None:
    (folder / "held-out.jsonl").write_text("{}\n{}\n")
    with refusing("sft.eval_dataset", match=r"held-out\.jsonl has changed since the run began"):
        find_run(folder / "run").check_data()


def test_a_folder_without_a_run_and_a_version_without_a_checkpoint_are_named(folder: Path) -> None:
    with pytest.raises(PathNotFound, match=r"has no run\.json"):
        find_run(folder)
    found = find_run(folder / "run")
    with pytest.raises(PathNotFound, match="has no complete checkpoint;"):
        found.checkpoint("2")
    with pytest.raises(PathNotFound, match="has no complete checkpoint;"):
        found.checkpoint(None)
    saved = folder / "run" / "checkpoints" / "version-000001"
    saved.mkdir(parents=True)
    write_loop_state(saved, LoopState(STEPS[0], {}))
    with pytest.raises(PathNotFound, match="those of versions 1, not of version 2"):
        found.checkpoint("2")
    with pytest.raises(PathNotFound, match=r"is not a checkpoint: it has no checkpoint\.json"):
        found.checkpoint(str(saved))
    (saved / "checkpoint.json").touch()
    assert [found.checkpoint(given) for given in ("1", str(saved), None)] == [saved] * 3


@pytest.mark.parametrize(
    ("given", "problem"),
    [("nothing", "is neither a checkpoint nor a run"), ("", "is neither a checkpoint nor a run"), ("ck/v1", "CONFIG by --run")],
)
def test_what_cannot_be_exported_is_named_as_it_was_given(
    folder: Path, given: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ck" / "v1").mkdir(parents=True)
    (folder / "ck" / "v1" / "checkpoint.json").touch()
    assert main(["export", str(folder / given)]) == 2
    told = capsys.readouterr().err
    assert f"{folder / given} " in told and problem in told


def test_the_node_of_a_client_has_no_run_but_a_model_to_export_from(folder: Path) -> None:
    (folder / "own.toml").write_text('state_dir = "own"\nmodel.path = "model"\n')
    found = find_run(folder / "own.toml")
    found.check_model()
    assert found.config.model.path == folder / "model"
    for refuse in (lambda: found.output_dir, found.check_data):
        with pytest.raises(InvalidArgument) as refused:
            refuse()
        assert refused.value.metadata["field"].startswith("train")
