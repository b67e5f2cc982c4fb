"""SGLang's own metrics on a whole node's page, beside ours."""

from __future__ import annotations

import pytest

from tests.conftest import RunningNode
from tests.engine_metrics import page, tokens_counted
from tests.integration.node_process import wait_for

pytestmark = pytest.mark.timeout(600)


def test_sglangs_metrics_follow_what_is_generated(roomy: RunningNode) -> None:
    before, made = tokens_counted(roomy, num_samples=3)
    ours, of_front = [old + made for old in before[:2]]
    # The rank counts each sample's first token elsewhere.
    wait_for(lambda: page(roomy).tokens() == [ours, of_front, before[2] + made - 3])
    shown = page(roomy).samples
    assert shown.keys() >= {"sglang:num_queue_reqs", "sglang:gen_throughput", "sglang:e2e_request_latency_seconds_bucket"}
    (usage,) = shown["sglang:token_usage"]
    assert usage.labels.items() >= {("service", "rollout"), ("tp_rank", "0")} and "dp_rank" not in usage.labels
