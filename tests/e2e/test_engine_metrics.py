"""SGLang's own metrics on a whole node's page, beside ours."""

import urllib.request
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tasuki.client import Client, Phase, SamplingParams
from tasuki.config.load import load_config
from tasuki.config.paths import config_path
from tests.conftest import RunningNode
from tests.limits import wait_for

pytestmark = pytest.mark.timeout(600)


_COUNTED = ("tasuki_rollout_tokens_total", "sglang:generation_tokens_total", "sglang:realtime_tokens_total")


@dataclass(frozen=True, slots=True)
class Page:
    samples: dict[str, list[Sample]]
    """Samples by metric name; each metric appears once on the page."""

    def tokens(self) -> list[float]:
        """Returns the generated tokens as counted by us, by SGLang's front, and by its ranks."""
        assert len(self.samples[_COUNTED[0]]) == 1
        decoded = {
            name: [one.value for one in self.samples.get(name, ()) if one.labels.get("mode", "decode") == "decode"]
            for name in _COUNTED
        }
        return [sum(decoded[name]) for name in _COUNTED]


def page(node: RunningNode) -> Page:
    listen = load_config(config_path(node.state_dir)).metrics.listen
    with urllib.request.urlopen(f"http://{listen}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert len(families) == len({family.name for family in families})
    samples: dict[str, list[Sample]] = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return Page(samples)


def tokens_counted(node: RunningNode, *, num_samples: int) -> tuple[list[float], int]:
    """Generates samples; returns the token counters from before and the number of tokens generated."""
    with Client(state_dir=node.state_dir) as client:
        client.acquire(Phase.ROLLOUT)
        before = page(node).tokens()
        samples = client.generate([[5, 6]], SamplingParams(max_new_tokens=8), num_samples=num_samples)
        client.acquire(Phase.TRAIN)
    return before, sum(len(sample.token_ids) for sample in samples)


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
