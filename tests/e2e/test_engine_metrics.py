"""SGLang's own metrics on a whole node's page, beside ours."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tasuki.client import Client, Phase, SamplingParams
from tasuki.config.load import load_config
from tasuki.config.places import config_path
from tests.conftest import RunningNode
from tests.integration.node_process import wait_for

pytestmark = pytest.mark.timeout(600)
_COUNTED = ("tasuki_rollout_tokens_total", "sglang:generation_tokens_total", "sglang:realtime_tokens_total")


def page(node: RunningNode) -> dict[str, list[Sample]]:
    """Samples by name."""
    listen = load_config(config_path(node.state_dir)).metrics.listen
    with urllib.request.urlopen(f"http://{listen}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert len(families) == len({family.name for family in families})
    found: dict[str, list[Sample]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def tokens(node: RunningNode) -> list[float]:
    """As counted by us, by SGLang in the front, and by its rank, which leaves out each sample's first token."""
    samples = page(node)
    assert len(samples[_COUNTED[0]]) == 1
    decoded = {
        name: [one for one in samples.get(name, ()) if one.labels.get("mode", "decode") == "decode"] for name in _COUNTED
    }
    return [sum(one.value for one in decoded[name]) for name in _COUNTED]


def test_sglangs_metrics_follow_what_is_generated(roomy: RunningNode) -> None:
    with Client(state_dir=roomy.state_dir) as client:
        client.acquire(Phase.ROLLOUT)
        before = tokens(roomy)
        samples = client.generate([[5, 6]], SamplingParams(max_new_tokens=8), num_samples=3)
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        made = [num_tokens, num_tokens, num_tokens - len(samples)]
        wait_for(lambda: tokens(roomy) == [old + new for old, new in zip(before, made, strict=True)])
        client.acquire(Phase.TRAIN)
    shown = page(roomy)
    assert shown.keys() >= {"sglang:num_queue_reqs", "sglang:gen_throughput", "sglang:e2e_request_latency_seconds_bucket"}
    (usage,) = shown["sglang:token_usage"]
    assert usage.labels.items() >= {("service", "rollout"), ("tp_rank", "0")} and "dp_rank" not in usage.labels
