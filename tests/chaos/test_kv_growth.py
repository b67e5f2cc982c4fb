"""A node with a growing KV cache: the same samples as before, even if its engine is struck while the cache grows or shrinks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest

from tasuki.cli.__main__ import main
from tasuki.client import Client, Phase, SamplingParams
from tasuki.config.failpoints import Action
from tasuki.config.load import load_config
from tasuki.config.places import config_path, journal_path, node_targets, pool_socket_path, room_signal_path, socket_dir
from tasuki.coordinator.audit.history import read_history
from tasuki.memory.pool import pool_bytes
from tasuki.memory.room_signal import RoomSignal
from tasuki.memory.stages import Stage
from tasuki.memory.tags import MovementKind
from tasuki.rpc.failpoints import plant
from tasuki.v1 import rollout_pb2, trainer_pb2, types_pb2
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.errors import TasukiError
from tests.chaos_node import ChaosNode
from tests.conftest import ENVIRONMENT, RunningNode, assert_clean_audit, started_node
from tests.e2e.test_pool import free, held, usage
from tests.footprint import MIB
from tests.limits import limit_s
from tests.models import VOCAB_SIZE
from tests.ports import free_port

pytestmark = pytest.mark.timeout(600)
# 128 MiB of KV cache: 2 layers, keys and values, 2 heads of 16, bfloat16.
_KV_TOKENS = (128 * MIB) // (2 * 2 * 2 * 16 * 2)
_BUDGET = 224 * MIB
_PROGRESS_S = 20
_MANY = SamplingParams(max_new_tokens=240, stop_token_ids=tuple(range(VOCAB_SIZE)))
"""Samples that end with their first token, but for which 500 requests reserve a quarter of the cache."""


@pytest.fixture(scope="module")
def growing() -> Iterator[RunningNode]:
    settings = [
        "memory.pool=true",
        f"memory.host_budget_bytes={_BUDGET}",
        "rollout.kv_growth=true",
        f"rollout.kv_tokens={_KV_TOKENS}",
        f"restart.progress_s={_PROGRESS_S}",
        f"metrics.listen=127.0.0.1:{free_port()}",
    ]
    with started_node(overrides=settings) as started:
        yield started


def mapped_bytes(node: RunningNode) -> tuple[int, int]:
    """Returns the mapped and the total bytes of the KV cache."""
    (cache,) = [tag for tag in usage(node, "rollout").tags if tag.tag == types_pb2.MEMORY_TAG_KV_CACHE]
    return cache.mapped_bytes, cache.total_bytes


def grow(node: RunningNode, client: Client) -> None:
    """Grows the cache by 500 requests for long samples."""
    least, total = mapped_bytes(node)
    assert len(client.generate([[5, 6]], _MANY, num_samples=500)) == 500
    grown, _ = mapped_bytes(node)
    assert least < grown < total


def state(node: RunningNode) -> rollout_pb2.GetRolloutStateResponse:
    with grpc.insecure_channel(node_targets(load_config(config_path(node.state_dir)))["rollout"]) as channel:
        return RolloutServiceStub(channel).GetRolloutState(rollout_pb2.GetRolloutStateRequest(), timeout=30)


def generate_long(node: RunningNode) -> None:
    """Generates samples for which DRAIN has to wait; they are lost with their engine."""
    with Client(state_dir=node.state_dir) as client, suppress(TasukiError):
        client.generate([[5, 6]], SamplingParams(max_new_tokens=240, ignore_eos=True), num_samples=16)


def start_long(node: RunningNode) -> threading.Thread:
    """Runs `generate_long` and returns once its samples run. Starts them again if they ended before this was seen."""
    for _ in range(10):
        generating = threading.Thread(target=generate_long, args=(node,))
        generating.start()
        while generating.is_alive():
            if state(node).num_running:
                return generating
    raise AssertionError("no sample was seen to run")


def greedy_again(chaos: ChaosNode) -> list[list[int]]:
    """Returns greedy samples once a struck engine is back."""
    deadline = time.monotonic() + 240
    while True:
        try:
            chaos.client.acquire(Phase.ROLLOUT)
            return chaos.greedy()
        except TasukiError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_changeovers_with_a_cache_that_grows_keep_weights_and_samples(growing: RunningNode) -> None:
    with Client(state_dir=growing.state_dir) as client:
        chaos = ChaosNode(growing, client)
        chaos.step()
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        for _ in range(3):
            client.acquire(Phase.TRAIN)
            client.acquire(Phase.ROLLOUT)
            assert chaos.greedy() == tokens
        grow(growing, client)
        assert free(growing) + held(growing) == pool_bytes(_BUDGET)
        # Everything that left behind OFFLOAD's answer was copied in full.
        assert {tag.leaves_later for tag in usage(growing, "trainer").tags} == {True, False}
        client.acquire(Phase.TRAIN)
        assert chaos.log_probs() == chaos.learned


def state_bytes(node: RunningNode) -> int:
    """Bytes of the trainer's weights and optimizer on the device."""
    return sum(tag.mapped_bytes for tag in usage(node, "trainer").tags if tag.leaves_later)


def test_the_trainers_state_leaves_when_a_growth_needs_its_room_and_not_before(growing: RunningNode) -> None:
    command = [sys.executable, "-m", "tests.integration.chunk_holder", str(pool_socket_path(growing.state_dir))]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert holder.stdin is not None and holder.stdout is not None
    try:
        with Client(state_dir=growing.state_dir) as client:
            chaos = ChaosNode(growing, client)
            chaos.step()
            for phase in (Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT):
                client.acquire(phase)
            stays = state_bytes(growing)
            tokens = chaos.greedy()
            assert stays and state_bytes(growing) == stays, "nobody needs its room"
            print(free(growing), file=holder.stdin, flush=True)
            assert holder.stdout.readline() == "done\n"
            generating = threading.Thread(target=grow, args=(growing, client))
            generating.start()
            deadline = time.monotonic() + 60
            while state_bytes(growing):
                assert time.monotonic() < deadline and generating.is_alive()
                time.sleep(0.1)
            print(0, file=holder.stdin, flush=True)
            generating.join()
            assert chaos.greedy() == tokens
            client.acquire(Phase.TRAIN)
            assert state_bytes(growing) == stays and chaos.log_probs() == chaos.learned
    finally:
        holder.kill()
        holder.wait()


def test_what_goes_on_behind_stages_is_shown_and_journalled(growing: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(state_dir=growing.state_dir) as client:
        for phase in (Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT):
            client.acquire(phase)
        stays = state_bytes(growing)
        assert main(["state", str(config_path(growing.state_dir))]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "to leave" in shown and "rollout kv_cache" in shown and "to grow" in shown
        with urllib.request.urlopen(
            f"http://{load_config(config_path(growing.state_dir)).metrics.listen}/metrics", timeout=60
        ) as text:
            told = text.read().decode()
        pending = [line for line in told.splitlines() if line.startswith("tasuki_memory_pending_bytes{")]
        assert sum(float(line.split()[-1]) for line in pending if 'movement="LEAVE"' in line) == stays > 0
        grow(growing, client)
        client.acquire(Phase.TRAIN)
    history = read_history(journal_path(growing.state_dir))
    begun, ended = history.movements.begun, history.movements.ended
    assert [intent.stage for intent in history.intents[-6:]] == [
        Stage.OFFLOAD, Stage.RESUME_KV, Stage.DRAIN, Stage.PAUSE_KV, Stage.PAUSE_WEIGHTS, Stage.LOAD_TRAINER,
    ]  # fmt: skip
    offload, resume_kv, _, pause_kv, _, load_trainer = (intent.id for intent in history.intents[-6:])
    assert sum(one.num_bytes for one in begun(offload)) == stays
    assert {(one.kind, one.num_bytes) for one in ended(load_trainer)} == {(MovementKind.LEAVE, 0)}, "nobody needed its room"
    (grows,), (grew,) = begun(resume_kv), ended(pause_kv)
    assert (grows.kind, grew.kind) == (MovementKind.GROW, MovementKind.GROW) and 0 < grew.num_bytes < grows.num_bytes
    assert_clean_audit(growing.state_dir)


def trainer_boot_id(node: RunningNode) -> str:
    with grpc.insecure_channel(node_targets(load_config(config_path(node.state_dir)))["trainer"]) as channel:
        return TrainerServiceStub(channel).GetTrainerState(trainer_pb2.GetTrainerStateRequest(), timeout=30).boot_id


def has_restarted(node: RunningNode, boot_id: str) -> bool:
    try:
        return trainer_boot_id(node) != boot_id
    except grpc.RpcError:
        return False


def wait_for_restart(node: RunningNode, boot_id: str) -> float:
    """Waits until the trainer has restarted by itself while rollout serves; returns the seconds."""
    started = time.monotonic()
    while not has_restarted(node, boot_id):
        assert time.monotonic() - started < limit_s(90.0)
        time.sleep(0.2)
    return time.monotonic() - started


@pytest.mark.parametrize("action", [Action.KILL, Action.STOP, Action.HANG])
@pytest.mark.parametrize("point", ["leave", "leave.done"])
def test_a_trainer_that_is_struck_while_its_state_leaves_comes_back(growing: RunningNode, point: str, action: Action) -> None:
    """Strikes the trainer behind OFFLOAD, where no command waits for it; a hang is detected by the progress of its copies."""
    with Client(state_dir=growing.state_dir, timeout_s=240) as client:
        chaos = ChaosNode(growing, client)
        client.acquire(Phase.TRAIN)
        chaos.step()
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            client.acquire(phase)
        boot_id = trainer_boot_id(growing)
        plant(socket_dir(growing.state_dir), "trainer0", point, action)
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        RoomSignal(room_signal_path(growing.state_dir)).request()
        wait_for_restart(growing, boot_id)
        assert chaos.greedy() == tokens, "rollout goes on"
        client.acquire(Phase.TRAIN)
        assert chaos.log_probs() == chaos.learned
        client.acquire(Phase.ROLLOUT)
        assert chaos.greedy() == tokens
    assert_clean_audit(growing.state_dir)


def end_last_samples(node: RunningNode, client: Client) -> threading.Thread:
    """Generates a batch and returns while only long samples of it still run: the cache shrinks, and room is offered."""
    generating = start_long(node)
    assert len(client.generate([[5, 6]], _MANY, num_samples=500, is_last=True)) == 500
    return generating


def wait_until_state_is(node: RunningNode, num_bytes: int) -> None:
    deadline = time.monotonic() + 60
    while state_bytes(node) != num_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def serve_without_state(chaos: ChaosNode) -> list[list[int]]:
    """Trains a step and brings the node to ROLLOUT, from which the trainer's state then leaves. Returns greedy samples."""
    chaos.client.acquire(Phase.TRAIN)
    chaos.step()
    chaos.client.acquire(Phase.ROLLOUT)
    tokens = chaos.greedy()
    RoomSignal(room_signal_path(chaos.node.state_dir)).request()
    wait_until_state_is(chaos.node, 0)
    return tokens


def test_the_trainers_state_returns_before_drain_as_the_last_samples_end(growing: RunningNode) -> None:
    signal = RoomSignal(room_signal_path(growing.state_dir))
    with Client(state_dir=growing.state_dir) as client:
        chaos = ChaosNode(growing, client)
        client.acquire(Phase.TRAIN)
        chaos.step()
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        stays = sum(tag.total_bytes for tag in usage(growing, "trainer").tags if tag.leaves_later)
        signal.request()
        wait_until_state_is(growing, 0)
        end_last_samples(growing, client).join()
        wait_until_state_is(growing, stays)
        # An engine that needs the room again gets it, and its samples are the same.
        signal.request()
        wait_until_state_is(growing, 0)
        assert chaos.greedy() == tokens
        end_last_samples(growing, client).join()
        wait_until_state_is(growing, stays)
        client.acquire(Phase.TRAIN)
        assert chaos.log_probs() == chaos.learned
        chaos.step()
        client.acquire(Phase.ROLLOUT)
        client.acquire(Phase.TRAIN)
        assert chaos.log_probs() == chaos.learned, "what the step wrote was copied"
    history = read_history(journal_path(growing.state_dir))
    loads = [intent.id for intent in history.intents if intent.stage is Stage.LOAD_TRAINER]
    returned = [one.num_bytes for one in history.movements.ended(loads[-2]) if one.kind is MovementKind.RETURN]
    assert sum(returned) == stays
    assert_clean_audit(growing.state_dir)


@pytest.mark.parametrize("action", [Action.KILL, Action.STOP, Action.HANG])
def test_a_trainer_that_is_struck_as_its_state_returns_early_comes_back(growing: RunningNode, action: Action) -> None:
    with Client(state_dir=growing.state_dir, timeout_s=240) as client:
        chaos = ChaosNode(growing, client)
        tokens = serve_without_state(chaos)
        boot_id = trainer_boot_id(growing)
        plant(socket_dir(growing.state_dir), "trainer0", "return", action)
        end_last_samples(growing, client).join()
        wait_for_restart(growing, boot_id)
        assert chaos.greedy() == tokens, "rollout goes on"
        client.acquire(Phase.TRAIN)
        assert chaos.log_probs() == chaos.learned
    assert_clean_audit(growing.state_dir)


@pytest.mark.parametrize("action", [Action.KILL, Action.STOP])
def test_a_trainer_that_is_struck_as_its_content_returns_comes_back(growing: RunningNode, action: Action) -> None:
    with Client(state_dir=growing.state_dir, timeout_s=240) as client:
        chaos = ChaosNode(growing, client)
        tokens = serve_without_state(chaos)
        boot_id = trainer_boot_id(growing)
        plant(socket_dir(growing.state_dir), "trainer0", "return.done", action)
        client.acquire(Phase.TRAIN)
        client.acquire(Phase.ROLLOUT)
        assert trainer_boot_id(growing) != boot_id
        assert chaos.greedy() == tokens
        client.acquire(Phase.TRAIN)
        assert chaos.log_probs() == chaos.learned
    assert_clean_audit(growing.state_dir)


@pytest.mark.parametrize("action", [Action.KILL, Action.STOP, Action.HANG])
@pytest.mark.parametrize("point", ["grow_cache", "grow_cache.mapped", "grow_cache.done"])
def test_an_engine_that_is_struck_while_its_cache_grows_comes_back(growing: RunningNode, point: str, action: Action) -> None:
    """A stopped engine is detected by its pulse, a hanging one by its progress; the client repeats the samples."""
    with Client(state_dir=growing.state_dir, timeout_s=240) as client:
        chaos = ChaosNode(growing, client)
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        boot_id = state(growing).boot_id
        plant(socket_dir(growing.state_dir), "scheduler0", point, action)
        grow(growing, client)
        assert state(growing).boot_id != boot_id
        assert chaos.greedy() == tokens
        client.acquire(Phase.TRAIN)
        assert free(growing) + held(growing) == pool_bytes(_BUDGET)


@pytest.mark.parametrize("action", [Action.KILL, Action.STOP, Action.HANG])
@pytest.mark.parametrize("point", ["shrink_cache", "shrink_cache.served", "shrink_cache.done"])
def test_an_engine_that_is_struck_while_its_last_samples_end_makes_them_again(
    growing: RunningNode, point: str, action: Action
) -> None:
    """Strikes before DRAIN; the pool loses nothing of the cache, and the trainer finds its room."""
    with Client(state_dir=growing.state_dir, timeout_s=240) as client:
        chaos = ChaosNode(growing, client)
        chaos.step()
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        boot_id = state(growing).boot_id
        plant(socket_dir(growing.state_dir), "scheduler0", point, action)
        generating = start_long(growing)
        assert len(client.generate([[5, 6]], _MANY, num_samples=500, is_last=True)) == 500
        generating.join()
        assert state(growing).boot_id != boot_id
        assert greedy_again(chaos) == tokens
        client.acquire(Phase.TRAIN)
        assert chaos.log_probs() == chaos.learned
        assert free(growing) + held(growing) == pool_bytes(_BUDGET)
    assert_clean_audit(growing.state_dir)


@pytest.mark.parametrize("action", [Action.KILL, Action.STOP, Action.HANG])
@pytest.mark.parametrize("point", ["shrink_cache", "shrink_cache.served", "shrink_cache.done"])
def test_an_engine_that_is_struck_while_its_cache_shrinks_comes_back(growing: RunningNode, point: str, action: Action) -> None:
    with Client(state_dir=growing.state_dir) as client:
        chaos = ChaosNode(growing, client)
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        grow(growing, client)
        plant(socket_dir(growing.state_dir), "scheduler0", point, action)
        generating = start_long(growing)
        client.acquire(Phase.TRAIN)
        generating.join()
        assert greedy_again(chaos) == tokens
    assert_clean_audit(growing.state_dir)
