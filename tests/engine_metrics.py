"""A node's metrics page, with those of SGLang, read while the node generates."""

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tasuki.client import Client, Phase, SamplingParams
from tasuki.config.load import load_config
from tasuki.config.paths import config_path
from tests.conftest import RunningNode

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
