"""A whole node whose memory is one pool: chunks pass between trainer and engine, and those of a killed process come back."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import datetime

import grpc
import pytest

from tasuki.client import Client, Phase
from tasuki.config.load import load_config
from tasuki.config.places import config_path, log_path, node_targets
from tasuki.memory.pool import pool_bytes
from tasuki.rpc.start_seconds import read_start_seconds
from tasuki.v1 import memory_pb2
from tasuki.v1.memory_pb2_grpc import MemoryServiceStub
from tests.chaos_node import ChaosNode
from tests.conftest import RunningNode, assert_clean_audit, started_node, tasuki
from tests.extent import only_whole
from tests.footprint import MIB, change_over, footprints, growth

pytestmark = pytest.mark.timeout(600)
_BUDGET = 96 * MIB


@pytest.fixture(scope="module")
def pooled() -> Iterator[RunningNode]:
    with started_node(overrides=["memory.pool=true", f"memory.host_budget_bytes={_BUDGET}"]) as started:
        yield started


def assert_seconds_are_told(node: RunningNode) -> None:
    """Checks that `tasuki up`, `tasuki state` and the services' logs report the same start-up seconds."""
    up = (node.config.parent / "up.log").read_text()
    state = tasuki("state", node.config, timeout_s=60).stdout
    for service, parts in {
        "trainer": ("imports", "model", "memory"),
        "rollout": ("imports", "weights", "plan", "engine"),
    }.items():
        total, line = re.findall(rf"^{service} serves after ([\d.]+) s: (.*)$", up, re.MULTILINE)[0]
        seconds = dict(part.rsplit(" ", 1) for part in line.split(", "))
        counted = read_start_seconds(node.state_dir, service)
        assert set(parts) <= counted.keys() and float(seconds["imports"]) > 0.2
        assert sum(counted.values()) <= float(total) + 0.1
        assert f"{service} start" in state and f"imports {seconds['imports']}" in state
        assert "event=started_in seconds=" in log_path(node.state_dir, service).read_text()


def usage(node: RunningNode, service: str) -> memory_pb2.GetUsageResponse:
    target = node_targets(load_config(config_path(node.state_dir)))[service]
    with grpc.insecure_channel(target) as channel:
        return MemoryServiceStub(channel).GetUsage(memory_pb2.GetUsageRequest(), timeout=30)


def held(node: RunningNode) -> int:
    """Bytes held by the tags of both services, in whole chunks."""
    tags = [tag for service in ("trainer", "rollout") for tag in usage(node, service).tags]
    return sum(tag.mapped_bytes + tag.kept_bytes for tag in tags)


def frees(node: RunningNode) -> set[int]:
    """Free bytes of the pool as each trainer rank reads them: of one moment only while nothing is reclaimed."""
    return {device.pool_free_bytes for device in usage(node, "trainer").devices}


def free(node: RunningNode) -> int:
    (free_bytes,) = frees(node)
    return free_bytes


def test_changeovers_keep_weights_and_samples_and_the_chunks_add_up(pooled: RunningNode) -> None:
    with Client(state_dir=pooled.state_dir) as client:
        chaos = ChaosNode(pooled, client)
        chaos.step()
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        for _ in range(3):
            for phase in (Phase.TRAIN, Phase.ROLLOUT):
                client.acquire(phase)
                assert free(pooled) + held(pooled) == pool_bytes(_BUDGET)
            assert chaos.greedy() == tokens
        client.acquire(Phase.TRAIN)
        assert chaos.log_probs() == chaos.learned


def test_the_trainer_imports_while_the_engine_starts(pooled: RunningNode) -> None:
    assert seconds_between_starts(pooled) < 1
    assert read_start_seconds(pooled.state_dir, "trainer")["room"] > 1
    assert "event=waiting_for_room service=rollout" in log_path(pooled.state_dir, "trainer").read_text()


def seconds_between_starts(node: RunningNode) -> float:
    """Seconds from the engine's launch to the trainer's."""
    log = log_path(node.state_dir, "supervisor").read_text()
    started = re.findall(r"^(\S+ \S+) .*event=started service=(\w+)", log, re.MULTILINE)
    times = {name: datetime.fromisoformat(stamp) for stamp, name in reversed(started)}
    return (times["trainer"] - times["rollout"]).total_seconds()


def test_trainer_and_engine_start_at_once_in_a_pool_that_holds_both() -> None:
    pool = ["memory.pool=true", f"memory.host_budget_bytes={2 * _BUDGET}"]
    with (
        started_node(overrides=pool, residency="[residency]\nstarts_together = true") as node,
        Client(state_dir=node.state_dir) as client,
    ):
        assert seconds_between_starts(node) < 1 and "room" not in read_start_seconds(node.state_dir, "trainer")
        assert_seconds_are_told(node)
        chaos = ChaosNode(node, client)
        chaos.step()
        client.acquire(Phase.ROLLOUT)
        assert chaos.greedy()
        client.acquire(Phase.TRAIN)
        assert chaos.log_probs() == chaos.learned


@only_whole
def test_chunks_of_a_killed_engine_come_back_and_the_next_one_finds_them(pooled: RunningNode) -> None:
    with Client(state_dir=pooled.state_dir) as client:
        chaos = ChaosNode(pooled, client)
        client.acquire(Phase.ROLLOUT)
        tokens, before = chaos.greedy(), free(pooled)
        (pid,) = chaos.pids("scheduler0")
        os.kill(pid, signal.SIGKILL)
        most, deadline = 0, time.monotonic() + 60
        while most <= before and time.monotonic() < deadline:
            most = max(most, *frees(pooled))
        assert most > before
        client.acquire(Phase.TRAIN)
        client.acquire(Phase.ROLLOUT)
        assert chaos.greedy() == tokens
        client.acquire(Phase.TRAIN)
        assert free(pooled) + held(pooled) == pool_bytes(_BUDGET)
    assert_clean_audit(pooled.state_dir)


@only_whole
def test_changeovers_leave_no_descriptor_and_no_memory(pooled: RunningNode) -> None:
    with Client(state_dir=pooled.state_dir) as client:
        change_over(client, num_changeovers=10)
        before = footprints(pooled)
        change_over(client, num_changeovers=40)
        for name, one in growth(before, footprints(pooled)).items():
            assert (one.num_fds, one.memfd_bytes, one.shm_bytes) == (0, 0, 0), f"{name} grew by {one}"
            assert one.rss_bytes < 8 * MIB, f"{name} grew by {one}"
