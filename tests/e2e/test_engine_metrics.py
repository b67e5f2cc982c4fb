"""SGLang's own metrics on a whole node's page, beside ours."""

import pytest

from tasuki.client import Client, Phase, SamplingParams
from tests.conftest import RunningNode
from tests.engine_metrics import page, tokens_counted
from tests.integration.node_process import wait_for

pytestmark = pytest.mark.timeout(600)


def test_sglangs_metrics_follow_what_is_generated(roomy: RunningNode) -> None:
    before, made = tokens_counted(roomy, num_samples=3)
    ours, of_front = [old + made for old in before[:2]]
    # The rank counts each sample's first token in another metric.
    wait_for(lambda: page(roomy).tokens() == [ours, of_front, before[2] + made - 3])
    shown = page(roomy).samples
    assert shown.keys() >= {"sglang:num_queue_reqs", "sglang:gen_throughput", "sglang:e2e_request_latency_seconds_bucket"}
    (usage,) = shown["sglang:token_usage"]
    assert usage.labels.items() >= {("service", "rollout"), ("tp_rank", "0")} and "dp_rank" not in usage.labels


def test_samples_of_a_prompt_compute_it_once(roomy: RunningNode) -> None:
    def cached_tokens() -> float:
        return sum(one.value for one in page(roomy).samples.get("sglang:cached_tokens_total", ()))

    prompts = [[number, *range(5, 68)] for number in (3, 4)]
    with Client(state_dir=roomy.state_dir) as client:
        client.acquire(Phase.ROLLOUT)
        before = cached_tokens()
        client.generate(prompts, SamplingParams(max_new_tokens=2), num_samples=5)
        client.acquire(Phase.TRAIN)
    # The last token is always computed, since its logits are needed.
    wait_for(lambda: cached_tokens() == before + 2 * 4 * 63)
