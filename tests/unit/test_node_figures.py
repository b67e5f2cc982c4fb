"""Figures of a run and of GPU time, as exported to Prometheus."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from tasuki.config.paths import training_output_path
from tasuki.coordinator import metrics_tail
from tasuki.coordinator.node_metrics import RunFigures, _whole_text, phase_label
from tasuki.rpc import metrics
from tasuki.rpc.metrics import GpuSeconds
from tasuki.v1 import types_pb2
from tasuki.v1.coordinator_pb2 import NodeState
from tasuki.wire.stages import Service


def told(figures: RunFigures) -> dict[tuple[str, ...], float]:
    figures.read()
    return {(sample.name, *sample.labels.values()): sample.value for family in figures.families() for sample in family.samples}


def run_of(folder: Path, *lines: str) -> RunFigures:
    """Figures of a state folder with these lines of a run."""
    (folder / "metrics.jsonl").write_text("".join(lines))
    training_output_path(folder).write_text(f"{folder}\n")
    return RunFigures(folder)


def test_a_torn_line_counts_once_it_is_whole(tmp_path: Path):
    figures = run_of(tmp_path, '{"step": 1}\n', '{"step": 2}\n', '{"step": 3')
    assert told(figures) == {("tasuki_run_step",): 2}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('}\n{"step"')
    assert told(figures) == {("tasuki_run_step",): 3}


def test_each_line_is_parsed_once_and_a_new_file_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parsed, figures_of = list[bytes](), metrics_tail._figures
    monkeypatch.setattr(metrics_tail, "_figures", lambda line: parsed.append(line) or figures_of(line))
    figures = run_of(tmp_path, '{"step": 1, "eval_score": 0.5}\n', '{"step": 2}\n')
    assert told(figures) == told(figures) == {("tasuki_run_step",): 2, ("tasuki_run_eval_score",): 0.5}
    assert len(parsed) == 2
    (tmp_path / "new").write_text('{"step": 0}\n')
    (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
    assert told(figures) == {("tasuki_run_step",): 0}


HUGE = "9" * 400


@pytest.mark.parametrize(
    "line", ["[]\n", "nonsense\n", '{"step": "no"}\n', "\n", "[" * 100_000 + "\n", f'{{"step": {HUGE}}}\n']
)
def test_a_line_that_is_no_step_is_left_out(tmp_path: Path, line: str):
    assert told(run_of(tmp_path, line)) == {}


def test_gpu_time_counts_while_work_goes_on_and_once_for_calls_that_overlap(monkeypatch: pytest.MonkeyPatch):
    now = 10.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
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


def test_metrics_of_services_are_joined_under_one_name_and_told_apart_by_a_label():
    def registry(*, value: float) -> CollectorRegistry:
        registry = CollectorRegistry()
        Counter("a", "Some {a} \n text.", ("x_service",), registry=registry).labels('"}\\ \n{').inc(value)
        Counter("empty", "None yet.", ("x",), registry=registry)
        Gauge("own", "Has the label.", ("service",), registry=registry).labels("mine").set(value)
        Histogram("h", "Some.", registry=registry).observe(value)
        return registry

    answers = {Service.TRAINER: generate_latest(registry(value=3.0))}
    own = [GaugeMetricFamily("plain", "One.", 1.0)]
    whole = _whole_text(registry(value=2.0), answers, own).decode()
    families = {family.name: family for family in text_string_to_metric_families(whole)}
    assert {name: family.type for name, family in families.items()} == {
        "a": "counter",
        "plain": "gauge",
        "own": "gauge",
        "h": "histogram",
    }
    assert [(sample.name, sample.labels, sample.value) for sample in families["a"].samples] == [
        ("a_total", {"service": "coordinator", "x_service": '"}\\ \n{'}, 2.0),
        ("a_total", {"service": "trainer", "x_service": '"}\\ \n{'}, 3.0),
    ]
    assert [sample.labels for sample in families["plain"].samples] == [{}]
    assert {sample.labels["service"] for sample in families["own"].samples} == {"mine"}
    counts = [sample.labels["service"] for sample in families["h"].samples if sample.name == "h_count"]
    assert counts == ["coordinator", "trainer"]
    assert families["a"].documentation == "Some {a} \n text."


def test_a_node_whose_place_is_unknown_is_in_no_changeover():
    between = NodeState(stage=types_pb2.STAGE_SYNC, changeover_id="c000001")
    holds = NodeState(stage=types_pb2.STAGE_RESUME_KV, phase=types_pb2.PHASE_ROLLOUT)
    assert [phase_label(state) for state in (NodeState(), between, holds)] == ["", "CHANGEOVER", "ROLLOUT"]
