"""A real Prometheus scrapes a real coordinator over the stage tests' trainer and rollout."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tasuki.config.paths import training_output_path
from tasuki.v1.types_pb2 import PHASE_ROLLOUT, PHASE_TRAIN
from tests.integration.coordinator_process import Node, running_coordinator
from tests.prometheus import PROMETHEUS, Prometheus, prometheus
from tools.grafana_dashboard import dashboard

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus of Debian's package is not installed")
STEP = {
    "step": 7,
    "mean_reward": 0.25,
    "eval_score": 0.5,
    "metrics": {"log_prob_gap": 0.001, "reward/format": 0.75, "entropy": 1.5},
    "seconds": {"generate": 1.25},
}


@pytest.fixture
async def node(tmp_path: Path, unused_tcp_port_factory) -> AsyncIterator[Node]:
    async with running_coordinator(tmp_path, metrics_port=unused_tcp_port_factory()) as node:
        yield node


async def test_it_scrapes_all_that_a_coordinator_knows_and_takes_the_dashboards_queries(
    node: Node, tmp_path: Path, unused_tcp_port_factory
) -> None:
    await node.acquire(PHASE_ROLLOUT)
    await node.acquire(PHASE_TRAIN)
    output = tmp_path / "output"
    output.mkdir()
    (output / "metrics.jsonl").write_text(json.dumps(STEP) + "\n" + '{"step": 8, "torn')
    training_output_path(node.config.state_dir).write_text(f"{output}\n")
    assert node.config.metrics.listen is not None

    def look(found: Prometheus) -> None:
        found.wait_until("up")
        names = found.names()
        assert {
            "tasuki_service_up", "tasuki_phase", "tasuki_gpus", "tasuki_changeovers_total", "tasuki_gpu_seconds_total",
            "tasuki_stage_seconds_bucket", "tasuki_stage_seconds_sum", "tasuki_device_free_bytes",
            "tasuki_run_step", "tasuki_run_reward", "tasuki_run_metric", "tasuki_run_step_seconds", "tasuki_run_eval_score",
            "grpc_server_started_total", "grpc_server_handled_total", "grpc_server_handling_seconds_bucket",
        } <= names  # fmt: skip
        assert not any(name.endswith("_created") for name in names)
        assert value(found, "tasuki_run_step") == 7 and value(found, 'tasuki_run_reward{name="format"}') == 0.75
        assert value(found, 'tasuki_run_metric{name="entropy"}') == 1.5
        assert value(found, 'tasuki_phase{phase="TRAIN"}') == 1 and value(found, 'tasuki_phase{phase="CHANGEOVER"}') == 0
        assert value(found, "sum(tasuki_changeovers_total)") == 2
        assert value(found, 'tasuki_service_up{service="rollout"}') == 1
        for query in (target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]):
            found.ask("query", query=query.replace("$node", ".*").replace("$__rate_interval", "1m"))

    def scrape() -> None:
        with prometheus(tmp_path / "prometheus", target=node.config.metrics.listen, port=unused_tcp_port_factory()) as found:
            look(found)

    await asyncio.to_thread(scrape)


def value(found: Prometheus, query: str) -> float:
    (series,) = found.ask("query", query=query)["result"]
    return float(series["value"][1])
