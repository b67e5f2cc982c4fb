"""Metrics have the same names in the code, in docs/metrics.md and on the dashboard of deploy/."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tasuki.config.load import load_config
from tasuki.rpc.metric_names import ALL, MetricName
from tasuki.rpc.metrics import CallMetrics
from tests.prometheus import PROMTOOL
from tools import grafana_dashboard

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/tasuki.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
LEGENDS = [(target["expr"], target["legendFormat"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
BY_NAME = {metric.name: metric for metric in ALL}
# Labels added by Prometheus, and the one with which all services share a metric.
EVERYWHERE = {"instance", "job", "service"}


def names_in(query: str) -> set[str]:
    return {re.sub(r"_(sum|count|bucket)$", "", name) for name in re.findall(r"\b(?:tasuki|grpc_server)_\w+", query)}


def test_dashboard_is_what_its_tool_prints() -> None:
    assert grafana_dashboard.dashboard() == DASHBOARD, "run tools/grafana_dashboard.py"


def test_dashboard_shows_every_metric_and_no_other() -> None:
    calls = CollectorRegistry()
    CallMetrics(calls)
    of_calls = {f"{family.name}{'_total' if family.type == 'counter' else ''}" for family in calls.collect()}
    shown = {name for query in QUERIES for name in names_in(query)}
    assert {name for name in shown if name.startswith("tasuki_")} == set(BY_NAME)
    assert shown - set(BY_NAME) <= of_calls


@pytest.mark.parametrize(("query", "legend"), LEGENDS)
def test_labels_of_a_query_and_its_legend_are_labels_of_its_metrics(query: str, legend: str) -> None:
    grouped = [label.strip() for group in re.findall(r" by \(([^)]*)\)", query) for label in group.split(",")]
    matched = re.findall(r"(\w+)\s*(?:=~|!=|=|!~)\s*\"", query)
    metrics = [BY_NAME[name] for name in names_in(query) if name in BY_NAME]
    known = EVERYWHERE | {label for metric in metrics for label in metric.labels}
    if not metrics:
        known |= {"grpc_method", "grpc_code", "grpc_service", "grpc_type"}
    assert {*grouped, *matched, *re.findall(r"{{(\w+)}}", legend)} <= known


def test_page_has_a_row_for_every_metric_as_the_code_says_it() -> None:
    rows = [line for line in (ROOT / "docs/metrics.md").read_text().splitlines() if line.startswith("| `tasuki_")]
    assert rows == [row(metric) for metric in ALL]


def row(metric: MetricName) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |"


def test_names_follow_prometheus_rules() -> None:
    for metric in ALL:
        assert re.fullmatch(r"tasuki_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") is (metric.kind == "counter")


def test_configuration_of_prometheus_scrapes_the_port_of_the_page() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert f'listen = "{target}"' in (ROOT / "docs/metrics.md").read_text()


@pytest.mark.parametrize(("page", "table"), [("metrics.md", "metrics"), ("tracing.md", "telemetry"), ("client.md", "track")])
def test_tables_of_the_page_are_read(page: str, table: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for block in blocks if f"[{table}]" in block]
    assert blocks
    for block in blocks:
        (tmp_path / "node.toml").write_text(f'state_dir = "node"\n[model]\npath = "model"\n{block}')
        assert table in load_config(tmp_path / "node.toml").model_fields_set


@pytest.mark.skipif(PROMTOOL is None, reason="promtool of Debian's package prometheus is not installed")
def test_promtool_takes_the_configuration() -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "config", "--syntax-only", str(ROOT / "deploy/prometheus/prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
