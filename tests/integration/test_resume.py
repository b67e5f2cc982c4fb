"""Resuming a run on a node: what is loaded, marked, and moved aside. The client is real, the node scripted."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tasuki.client import Client
from tasuki.client.dataset import Dataset
from tasuki.client.loop_state import LoopState, PendingStep, read_pending, write_loop_state, write_pending
from tasuki.client.step import Step
from tasuki.config.load import load_config, save_config
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.paths import config_path, model_texts_path, training_log_path, training_output_path
from tasuki.models.folder_files import file_digest
from tasuki.node.start import _begin_at_the_model
from tasuki.runs.earlier_run import EarlierRun, begun_at
from tasuki.runs.folder import MetricsFile
from tasuki.runs.recipe import RunSettings
from tasuki.runs.resume import Continuation, begin, check_restart, go_on, resumable_run
from tasuki.v1 import types_pb2
from tasuki.wire.errors import InvalidArgument, PathNotFound, TasukiError
from tests.integration.scripted_node import ScriptedNode, scripted_node
from tests.unit.test_plan_cli import CONFIG

BEGUN = datetime.fromisoformat("2026-01-02T23:59:59")


@dataclass(frozen=True, slots=True)
class Run:
    """A run that began on the node at version 0."""

    node: ScriptedNode
    folder: Path

    @property
    def output_dir(self) -> Path:
        return self.folder / "run"

    async def begin(self) -> None:
        await asyncio.to_thread(self._with_client, "begin")

    async def go_on(self) -> Continuation:
        return await asyncio.to_thread(self._with_client, "go_on")

    def train(self, num_steps: int, *, saves: int = 0) -> None:
        """Leaves a life of the run on the node and in the folder. saves: the number of steps in its last checkpoint, if any."""
        metrics = MetricsFile(self.output_dir)
        for number in range(num_steps):
            metrics.report(Step(number, policy_version=number, mean_reward=0.5, num_policy_steps=1))
        self.node.policy_version = num_steps
        if saves:
            position = {"seed": 0, "epoch": 0, "next": 0, "num_rows": 1}
            write_loop_state(self.checkpoint(saves), LoopState(metrics.steps[saves - 1], position))

    def checkpoint(self, version: int) -> Path:
        path = self.output_dir / "checkpoints" / f"version-{version:06d}"
        path.mkdir(parents=True)
        return path

    def look(self) -> EarlierRun | None:
        config = load_config(self.folder / "node.toml")
        assert config.train is not None
        return resumable_run(config, RunSettings.of(config.train, num_steps=config.train.num_steps), Dataset([{"prompt": "a"}]))

    def _with_client(self, action: str) -> Continuation:
        config = load_config(self.folder / "node.toml")
        assert config.train is not None
        settings = RunSettings.of(config.train, num_steps=config.train.num_steps)
        with Client(state_dir=config.state_dir) as client:
            if action == "begin":
                return begin(client, config, settings, config_dir=Path.cwd(), now=BEGUN)
            earlier = self.look()
            assert earlier is not None
            return go_on(client, config, settings, earlier)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    for folder in ("run", "model"):
        (tmp_path / folder).mkdir()
    save_file({}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "node.toml").write_text(
        'state_dir = "node"\n[model]\npath = "model"\n[train]\ndataset = "train.jsonl"\noutput_dir = "run"\n'
        'save_every = 4\n[train.reward]\nfunction = "a:b"\n'
    )
    (tmp_path / "node").mkdir()
    async with scripted_node(tmp_path / "node") as node:
        run = Run(node, tmp_path)
        await run.begin()
        assert begun_at(run.output_dir) == BEGUN
        yield run


async def test_a_node_that_has_the_run_keeps_what_it_learned_but_for_gradients_of_a_broken_step(run: Run) -> None:
    run.train(6, saves=4)
    run.node.num_forward_backward = 1
    found = await run.go_on()
    assert (found.first_step, run.node.policy_version, run.node.num_forward_backward) == (6, 6, 0)


async def test_a_run_that_begins_with_what_another_has_learned_says_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "begins with" not in capsys.readouterr().err  # at version 0
    run.node.policy_version = 6
    training_output_path(run.folder / "node").write_text("/earlier\n")
    await run.begin()
    told = f"policy version 6, which the run in /earlier left, not with {run.folder / 'model'}"
    assert f"begins with the node's own weights, {told}; for the model's: tasuki down" in capsys.readouterr().err


async def test_a_run_does_not_begin_with_other_texts_than_the_node(run: Run) -> None:
    config = run.folder / "model" / "config.json"
    model_texts_path(run.folder / "node").write_text(json.dumps({"config.json": file_digest(config)}))
    await run.begin()
    content = config.read_text()
    config.write_text(content + " ")
    with pytest.raises(InvalidArgument, match=r"config\.json has changed since the node started"):
        await run.begin()
    config.write_text(content)
    await run.begin()


async def test_a_node_that_began_from_its_model_gets_the_checkpoint_and_what_is_not_complete_after_it_goes(run: Run) -> None:
    run.train(6, saves=4)
    run.checkpoint(3)
    run.checkpoint(8)
    checkpoints = run.output_dir / "checkpoints"
    (checkpoints / "version-000009").symlink_to("/dev/null")
    (checkpoints / "version-000010").write_text("no folder")
    _begin_at_the_model(run.folder / "node")
    run.node.policy_version = 0
    found = await run.go_on()
    assert (found.first_step, run.node.policy_version) == (4, 4)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["version-000003", "version-000004"]
    # From here on the node belongs to the run again.
    MetricsFile(run.output_dir, found.steps).report(Step(4, policy_version=4, mean_reward=0.5, num_policy_steps=1))
    run.node.policy_version = 5
    assert (await run.go_on()).first_step == 5


async def test_a_step_whose_updates_have_begun_keeps_its_gradients_and_is_continued(run: Run) -> None:
    run.train(6, saves=4)
    begun = PendingStep(Step(6, policy_version=6, position={"next": 0}, estimator={"kl_coef": 0.5}), measured=[{"loss": 0.1}])
    write_pending(run.output_dir, begun)
    run.node.pending = {types_pb2.ROLE_POLICY, types_pb2.ROLE_CRITIC}
    run.node.policy_version = 8
    found = await run.go_on()
    assert (found.first_step, run.node.policy_version, len(run.node.pending)) == (6, 8, 2)
    assert found.pending is not None
    assert (found.pending.step, found.pending.measured) == (begun.step, begun.measured)
    assert found.pending.request_id == begun.request_id
    assert run.node.begun == [False]  # the schedule and the optimizer's state continue


async def test_a_node_that_gets_the_checkpoint_does_not_continue_a_step_of_the_node_before(run: Run) -> None:
    run.train(6, saves=4)
    write_pending(run.output_dir, PendingStep(Step(4, policy_version=4)))
    _begin_at_the_model(run.folder / "node")
    run.node.policy_version = 0
    assert (await run.go_on()).pending is None
    assert read_pending(run.output_dir) is None


async def test_a_damaged_record_of_a_step_is_refused_only_where_it_counts(run: Run) -> None:
    run.train(6, saves=4)
    (run.output_dir / "pending.json").write_text('{"step": 6}')
    with pytest.raises(InvalidArgument, match=r"pending\.json is damaged .*; stop the node and resume from a checkpoint"):
        await run.go_on()
    _begin_at_the_model(run.folder / "node")
    run.node.policy_version = 0
    assert (await run.go_on()).first_step == 4


@pytest.mark.parametrize("refusal", [InvalidArgument("path", "cannot be restored"), PathNotFound("is no checkpoint")])
async def test_a_checkpoint_that_cannot_be_loaded_is_named_and_nothing_is_changed(run: Run, refusal: TasukiError) -> None:
    run.train(6, saves=4)
    (run.output_dir / "summary.json").write_text("{}")
    _begin_at_the_model(run.folder / "node")
    run.node.policy_version = 0
    run.node.refusals = [refusal]
    with pytest.raises(InvalidArgument, match=rf"{refusal.message}; remove .*version-000004 to restart the run at step 0"):
        await run.go_on()
    assert (run.output_dir / "summary.json").exists()
    assert not (run.folder / "node" / "training.run").exists()


async def test_a_checkpoint_that_the_trainers_log_may_build_on_stays(run: Run) -> None:
    run.train(8, saves=4)
    run.checkpoint(8)
    assert (await run.go_on()).first_step == 8
    assert (run.output_dir / "checkpoints" / "version-000008").exists()


async def test_the_model_of_an_earlier_end_is_kept_under_its_step(run: Run) -> None:
    run.train(6, saves=4)
    for text in ("first", "again"):
        (run.output_dir / "model").mkdir()
        (run.output_dir / "model" / "config.json").write_text(text)
        (run.output_dir / "summary.json").write_text("{}")
        await run.go_on()
        assert not (run.output_dir / "model").exists()
        assert not (run.output_dir / "summary.json").exists()
    (run.output_dir / "model").mkdir()  # exported, and then the client died
    await run.go_on()
    assert sorted(path.name for path in run.output_dir.glob("model*")) == ["model-000005"]
    assert (run.output_dir / "model-000005" / "config.json").read_text() == "first"


async def test_a_run_without_a_checkpoint_begins_again_only_when_it_saves_from_now_on(run: Run) -> None:
    run.train(2)
    _begin_at_the_model(run.folder / "node")
    run.node.policy_version = 0
    assert (await run.go_on()).first_step == 0
    config = run.folder / "node.toml"
    config.write_text(config.read_text().replace("save_every = 4\n", ""))
    no_checkpoint = r"train\.save_every: is not set, and the run in .* left no checkpoint"
    with pytest.raises(InvalidArgument, match=no_checkpoint):
        await run.go_on()


async def test_a_run_without_a_checkpoint_is_refused_before_a_node_starts_for_it(run: Run) -> None:
    run.train(2)
    path = run.folder / "node.toml"
    path.write_text(path.read_text().replace("save_every = 4\n", ""))
    config, earlier = load_config(path), run.look()
    assert config.train is not None and earlier is not None
    settings = RunSettings.of(config.train, num_steps=config.train.num_steps)
    with pytest.raises(InvalidArgument, match=r"train\.save_every: is not set") as refused:
        check_restart(earlier, config, settings)
    assert "tasuki up" not in refused.value.message
    training_log_path(config.state_dir).touch()
    with pytest.raises(InvalidArgument, match="or resume the node that learned it: tasuki up CONFIG --resume"):
        check_restart(earlier, config, settings)
    save_config(config, config_path(config.state_dir))
    with StateLock.take(config.state_dir, name=NODE_LOCK):
        check_restart(earlier, config, settings)  # the node may still have what the run learned
