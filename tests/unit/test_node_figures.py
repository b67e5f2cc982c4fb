"""Figures of a run and of GPU time, as they are told to Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tasuki.config.places import training_output_path
from tasuki.coordinator.node_metrics import _labelled, _parsed
from tasuki.coordinator.run_figures import last_steps, run_families
from tasuki.rpc import gpu_seconds
from tasuki.rpc.gpu_seconds import GpuSeconds
from tasuki.rpc.metrics import joined

NAN = float("nan")


def told(steps: list[dict[str, Any]]) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for family in run_families(steps) for sample in family.samples}


def run_of(folder: Path, *lines: str) -> Path:
    """A state folder whose run left these lines."""
    (folder / "metrics.jsonl").write_text("".join(lines))
    training_output_path(folder).write_text(f"{folder}\n")
    return folder


def test_the_last_whole_line_counts(tmp_path: Path):
    steps = last_steps(run_of(tmp_path, '{"step": 1}\n', '{"step": 2}\n', '{"step": 3'))
    assert [step["step"] for step in steps] == [1, 2]


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path):
    filler = json.dumps({"step": 1, "metrics": {"x" * 1000: 0.0}}) + "\n"
    steps = last_steps(run_of(tmp_path, *[filler] * 1000, '{"step": 2}\n'))
    assert steps[-1]["step"] == 2 and 200 < len(steps) < 300


@pytest.mark.parametrize("line", ["[]\n", "nonsense\n", '{"step": "no"}\n', "\n"])
def test_a_line_that_is_no_step_is_left_out(tmp_path: Path, line: str):
    assert last_steps(run_of(tmp_path, line)) == []


def test_without_a_run_there_are_no_figures(tmp_path: Path):
    assert last_steps(tmp_path) == [] and told([]) == {}
    training_output_path(tmp_path).write_text("/nonexistent\n")
    assert last_steps(tmp_path) == []


def test_an_evaluation_hides_neither_the_last_reward_nor_the_last_score():
    learned = {"step": 3, "mean_reward": 0.5, "metrics": {"reward/exact": 0.25, "loss": NAN}, "seconds": {"generate": 2.0}}
    found = told([{"step": 2, "eval_score": 0.75, "metrics": {}}, learned, {"step": 4, "metrics": {}}])
    assert found == {
        ("tasuki_run_step",): 4,
        ("tasuki_run_reward", "mean"): 0.5,
        ("tasuki_run_reward", "exact"): 0.25,
        ("tasuki_run_eval_score",): 0.75,
        ("tasuki_run_step_seconds", "generate"): 2.0,
        ("tasuki_run_metric", "reward/exact"): 0.25,
    }


def test_gpu_time_counts_while_work_goes_on_and_once_for_calls_that_overlap(monkeypatch: pytest.MonkeyPatch):
    now = 10.0
    monkeypatch.setattr(gpu_seconds.time, "monotonic", lambda: now)
    registry = CollectorRegistry()
    gpu = GpuSeconds(registry, num_gpus=4)

    def seconds() -> float | None:
        return registry.get_sample_value("tasuki_gpu_seconds_total", {"use": "generate"})

    assert seconds() is None
    with gpu.using("generate"):
        now = 11.0
        with gpu.using("generate"):
            now = 13.0
            assert seconds() == 12.0
        now = 14.0
    now = 20.0
    assert seconds() == 16.0


def test_families_of_services_are_joined_under_one_name_and_told_apart_by_a_label():
    text = b'# HELP a_total Some.\n# TYPE a_total counter\na_total{x="1"} 2.0\n# TYPE a_created gauge\na_created 1.0\n'
    families = [_labelled(family, service) for service in ("trainer", "rollout") for family in _parsed(text)]
    (family,) = joined(families)
    assert family.type == "counter"
    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("a_total", {"service": "trainer", "x": "1"}, 2.0),
        ("a_total", {"service": "rollout", "x": "1"}, 2.0),
    ]
