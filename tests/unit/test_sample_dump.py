"""Sample files of a run for people: the fields of a line, how much is kept, and a run that no slow disk delays."""

import json
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasuki.client.rewards import Completion, Scores
from tasuki.client.sample_dump import SampleDump
from tasuki.client.shown_samples import ShownSamples
from tasuki.client.types import FinishReason, Sample, VersionSpan
from tasuki.config.train_schema import TrainConfig
from tests.limits import wait_for
from tests.tiny_disk import tmpfs
from tests.unit.loop_node import LoopClient, by_number, changed, loop_of, steps_of, train_config

NAN = float("nan")


@pytest.fixture
def settings(tmp_path: Path) -> TrainConfig:
    return train_config(tmp_path)


def run(settings: TrainConfig, client: LoopClient | None = None, **options: Any) -> dict[int, list[dict[str, Any]]]:
    """Returns the lines of each step's file."""
    settings.output_dir.mkdir(exist_ok=True)
    folder = settings.output_dir / "samples"
    with SampleDump(folder, **options) as dump:
        loop = loop_of(client or LoopClient(), settings, reward={"number": by_number, "odd": lambda prompt, number: number % 2})
        loop.dump = dump
        steps_of(loop)
    return {int(path.stem.removeprefix("step-")): lines(path) for path in sorted(folder.glob("*"))}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown_step(step: int, text: str = "text", *, num_tokens: int = 3) -> ShownSamples:
    shown = ShownSamples(step, num_groups=1)
    sample = Sample(
        0, 0, np.arange(num_tokens, dtype=np.int32), np.full(num_tokens, -0.5, dtype=np.float32), FinishReason.STOP, 7
    )
    completion = Completion.of(sample, text=text, prompt_token_ids=[1])
    rewards = np.array([NAN], dtype=np.float32)
    shown.add([{"prompt": "p"}], [completion], [sample], Scores(rewards, 1, {"r": rewards}), rewards)
    return shown


def test_a_line_has_all_that_is_known_of_a_sample(settings: TrainConfig):
    (found,) = run(settings).values()
    assert [(line["group"], line["sample"]) for line in found] == [(group, sample) for group in range(3) for sample in range(4)]
    line = found[3]
    assert line.keys() == {
        "step", "group", "sample", "policy_version", "version_spans", "failure",
        "prompt", "fields", "completion", "finish_reason", "reward", "rewards",
        "advantage", "log_prob_gap", "log_prob_gap_max", "temperature", "prompt_token_ids", "token_ids", "loss_mask", "advantages",
        "rollout_log_probs", "trainer_log_probs",
    }  # fmt: skip
    assert line["rewards"] == {"number": 3.0, "odd": 1.0}
    assert line["reward"] == 4.0
    assert line["advantage"] == max(one["advantage"] for one in found) > 0
    assert line["finish_reason"] == "stop" and line["policy_version"] == 0 and line["temperature"] == 0.5
    assert line["completion"] == " ".join(map(str, line["token_ids"]))
    # The client's log-probs are -0.5 from rollout and -0.25 from the trainer.
    assert line["rollout_log_probs"] == [-0.5] * 3 and line["trainer_log_probs"] == [-0.25] * 3
    assert line["log_prob_gap"] == line["log_prob_gap_max"] == 0.25


def test_a_step_whose_updates_have_begun_has_its_samples_on_disk(settings: TrainConfig):
    class Kills(LoopClient):
        def forward_backward(self, *arguments: Any, **more: Any) -> Any:
            (found,) = (settings.output_dir / "samples").glob("step-*")
            assert len(lines(found)) == 12
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(settings, Kills())


def test_a_sample_says_which_versions_drew_it_and_why_its_reward_failed():
    shown, tokens = ShownSamples(0, num_groups=1), np.arange(3, dtype=np.int32)
    spans = [VersionSpan(num_tokens=1, policy_version=6), VersionSpan(num_tokens=2, policy_version=7)]
    own = Sample(0, 0, tokens, np.zeros(3, np.float32), FinishReason.STOP, 7, version_spans=spans)
    made, rewards = [Completion.of(own, text="", prompt_token_ids=[1])] * 2, np.zeros(2, np.float32)
    shown.add([{"prompt": "p"}], made, [own, own], Scores(rewards, 1, {"r": rewards}, ["", "raised"]), rewards)
    first, second = (one.record() for one in shown.samples)
    assert (first["sample"], second["sample"], first["failure"], second["failure"]) == (0, 1, None, "raised")
    assert first["version_spans"] == [[1, 6], [2, 7]]


def test_every_reward_is_written_some_texts_and_few_tokens(settings: TrainConfig):
    (found,) = run(settings, groups_per_step=1, num_texts=2).values()
    assert sorted(line["reward"] for line in found) == [0.0] * 3 + [2.0] * 6 + [4.0] * 3
    with_text, with_tokens = ({line["group"] for line in found if name in line} for name in ("completion", "token_ids"))
    assert len(with_tokens) == 1 and with_text == {0, 1} | with_tokens


def test_held_out_completions_are_written_beside_the_step_that_was_evaluated(settings: TrainConfig):
    loop = loop_of(LoopClient(), changed(settings, eval={"num_samples": 2, "temperature": 1.0}), reward=by_number)
    loop.eval_rows = [{"prompt": str(row), "answer": row} for row in range(3)]
    with SampleDump(settings.output_dir / "evaluations", groups_per_step=0, num_texts=2) as loop.eval_dump:
        steps_of(loop)
    written = {path.stem: lines(path) for path in (settings.output_dir / "evaluations").iterdir()}
    assert written.keys() == {"step-000000", "step-000001"}
    for found in written.values():
        figures = [(line["group"], line["sample"], line["reward"]) for line in found]
        assert figures == [(row, one, one) for row in range(3) for one in range(2)]
        assert [line.get("fields") for line in found] == [{"answer": 0}] * 2 + [{"answer": 1}] * 2 + [None] * 2


def test_samples_are_for_their_owner_alone(settings: TrainConfig):
    run(settings)
    folder = settings.output_dir / "samples"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())} == {0o700, 0o600}


def test_log_probs_before_the_first_of_several_updates_are_shown_where_the_loop_has_them(settings: TrainConfig):
    own = changed(settings, num_mini_batches=3)
    (found,) = run(own).values()
    assert {tuple(line["trainer_log_probs"]) for line in found} == {(-0.625,) * 3}


def test_a_step_that_is_made_again_replaces_its_file(tmp_path: Path):
    for text in ("before", "after"):
        with SampleDump(tmp_path) as dump:
            dump.write(shown_step(4, text))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004.jsonl"]
    assert [line["completion"] for line in lines(tmp_path / "step-000004.jsonl")] == ["after"]


def test_a_reward_that_is_not_finite_is_null_and_text_without_unicode_is_readable(tmp_path: Path):
    with SampleDump(tmp_path) as dump:
        dump.write(shown_step(0, "é\ud800"))
    (line,) = lines(tmp_path / "step-000000.jsonl")
    assert line["reward"] is None and line["rewards"] == {"r": None}
    assert line["completion"] == "é\ud800" and line["advantage"] is None


def test_the_oldest_steps_go_when_the_files_are_too_large(tmp_path: Path):
    with SampleDump(tmp_path, max_bytes=20_000) as dump:
        for step in range(12):
            dump.write(shown_step(step))
            time.sleep(0.01)
    with SampleDump(tmp_path, max_bytes=20_000) as dump:  # as in a resumed run
        dump.write(shown_step(12))
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found[-1] == "step-000012.jsonl" and 1 < len(found) < 12
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) <= 20_000


def test_a_full_disk_is_told_once_and_samples_come_again_when_there_is_room(tmp_path: Path):
    told: list[str] = []
    with tmpfs(tmp_path / "disk", num_kib=256) as disk:
        disk.fill()
        with SampleDump(disk.folder / "samples", tell=told.append) as dump:
            dump.write(shown_step(0, "t" * 9000))
            dump.write(shown_step(1, "t" * 9000))
            wait_for(lambda: bool(told))
            disk.free()
            dump.write(shown_step(2, "t" * 9000))
        left = {path.name for path in (disk.folder / "samples").iterdir()}
        assert "step-000002.jsonl" in left and "step-000000.jsonl" not in left
    assert len(told) == 1 and "No space left" in told[0] and "the run continues" in told[0]
