"""Settings of the starting points in deploy/config, on a two-rank node with a tiny model: a changeover each way and two steps."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tasuki.client import Client, Phase
from tasuki.config.load import load_config
from tasuki.config.paths import config_path
from tasuki.v1 import types_pb2
from tests.chaos_node import ChaosNode
from tests.conftest import ROOT, assert_clean_audit, started_node
from tests.e2e.test_residency import tags
from tests.extent import only_whole

pytestmark = pytest.mark.timeout(600)
_SCALED = {"trainer.num_ranks": 2, "trainer.micro_batch_tokens": 64, "rollout.context_length": 64}
"""Replaced settings whose values fit only the files' models."""


def settings_of(name: str) -> dict[str, Any]:
    """Keys of both services, for a node of two GPUs."""
    tables = tomllib.loads((ROOT / "deploy" / "config" / f"{name}.toml").read_text())
    settings = dict(_keys({service: tables[service] for service in ("trainer", "rollout")}))
    settings |= {key: value for key, value in _SCALED.items() if key in settings}
    return settings | {"rollout.tp_size": min(2, settings["rollout.tp_size"])}


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize(
    "name", ["constrained", *(pytest.param(name, marks=only_whole) for name in ("balanced", "70b", "72b-lora"))]
)
def test_a_starting_point_learns_on_a_node(name: str) -> None:
    settings = settings_of(name)
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    with started_node(overrides=overrides) as node, Client(state_dir=node.state_dir) as client:
        running = load_config(config_path(node.state_dir)).model_dump(mode="json")
        assert {key: _value(running, key) for key in settings} == settings
        chaos = ChaosNode(node, client)
        before = chaos.log_probs()
        assert chaos.step() == 1
        client.acquire(Phase.ROLLOUT)
        assert all(chaos.greedy())
        client.acquire(Phase.TRAIN)
        assert chaos.learned != before and chaos.log_probs() == chaos.learned, "what left is back"
        assert chaos.step() == 2
        moments = sum(tag.total_bytes for tag in tags(node)["trainer"] if tag.tag == types_pb2.MEMORY_TAG_OPTIMIZER)
        assert (moments == 0) is (settings.get("trainer.moments") == "host")
        logged = "".join(log.read_text() for log in (node.state_dir / "logs").glob("trainer*.log"))
        assert f"choice={settings.get('trainer.checkpointing', 'none')}" in logged
        assert_clean_audit(node.state_dir)


def _value(table: Mapping[str, Any], key: str) -> Any:
    first, _, rest = key.partition(".")
    return _value(table[first], rest) if rest else table[first]
