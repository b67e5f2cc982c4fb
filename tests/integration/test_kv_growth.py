"""A real engine whose KV cache grows behind RESUME_KV, beside a process that holds the memory it grows into."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tasuki.config.places import pool_socket_path
from tasuki.memory.pool import PoolKeeper
from tasuki.rollout.kv_growth import NUM_STEPS
from tasuki.rpc.metric_names import KV_CAPACITY, KV_SERVED
from tasuki.transport.pool_socket import PoolServer
from tasuki.v1 import types_pb2
from tasuki.v1.rollout_pb2 import KvCacheState
from tests.conftest import ENVIRONMENT
from tests.extent import only_whole
from tests.integration.rollout_process import (
    RolloutClient,
    RolloutProcess,
    TestTrainer,
    connected,
    start_rollout,
    stop_rollout,
    wait_until_serving,
)
from tests.integration.test_rollout_memory import usage_of
from tests.models import make_model

pytestmark = pytest.mark.timeout(600)
KV, WEIGHTS = types_pb2.MEMORY_TAG_KV_CACHE, types_pb2.MEMORY_TAG_WEIGHTS
MIB = 1 << 20
# 2 layers, keys and values, 2 heads of 16, bfloat16: 256 MiB.
NUM_TOKENS = (256 * MIB) // (2 * 2 * 2 * 16 * 2)
POOL_BYTES = 320 * MIB
STALL_S = 4.0


class Node:
    """A rollout service and a holder of memory, over one pool that this process keeps."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._keeper = PoolKeeper(POOL_BYTES, device="cpu")
        pool_socket_path(folder).parent.mkdir(parents=True, exist_ok=True)
        self._server = PoolServer(self._keeper, pool_socket_path(folder))
        self._is_over = threading.Event()
        self._polling = threading.Thread(target=self._poll, daemon=True)
        self._polling.start()
        self.rollout: RolloutProcess = start_rollout(
            folder,
            model,
            f"rollout.kv_tokens={NUM_TOKENS}",
            "rollout.kv_growth=true",
            "memory.pool=true",
            f"memory.host_budget_bytes={POOL_BYTES}",
            "restart.stall_s=2",
            f"restart.progress_s={STALL_S}",
        )
        self.holder = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.chunk_holder", str(pool_socket_path(folder))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        wait_until_serving(self.rollout)
        self.trainer = TestTrainer(self.rollout.socket_dir, "trainer", make_model("qwen2", seed=1))

    @property
    def free_bytes(self) -> int:
        return self._keeper.usage().free_bytes

    def hold(self, num_bytes: int) -> None:
        assert self.holder.stdin is not None and self.holder.stdout is not None
        self.holder.stdin.write(f"{num_bytes}\n")
        self.holder.stdin.flush()
        assert self.holder.stdout.readline() == "done\n"

    def leave(self, num_bytes: int) -> None:
        """Holds all chunks that are free, but for these."""
        self.hold(0)
        self.hold(self.free_bytes - num_bytes)

    def close(self) -> None:
        self.trainer.close()
        self.holder.kill()
        self.holder.wait()
        stop_rollout(self.rollout)
        self._is_over.set()
        self._polling.join()
        self._server.close()
        self._keeper.close()

    def _poll(self) -> None:
        while not self._is_over.wait(0.02):
            self._server.poll()


@pytest.fixture(scope="module")
def node(rollout_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("growth"), rollout_model)
    yield node
    node.close()


@pytest.fixture
async def rollout(node: Node) -> AsyncIterator[RolloutClient]:
    async with connected(node.rollout) as client:
        await client.sleep()
        node.hold(0)
        yield client
        await client.sleep()


async def growth_until(rollout: RolloutClient, is_there: Callable[[KvCacheState], bool]) -> KvCacheState:
    deadline = time.monotonic() + 60
    while not is_there(state := (await rollout.state()).kv_cache):
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.02)
    return state


def is_whole(state: KvCacheState) -> bool:
    return state.num_tokens == state.served_tokens > 0 and not state.is_growing


def is_short(state: KvCacheState) -> bool:
    return state.needed_bytes > 0


async def kv_bytes(rollout: RolloutClient) -> tuple[int, int, int]:
    """Mapped, total, and what follows a resume."""
    (tag,) = [one for one in (await usage_of(rollout)).tags if one.tag == KV]
    return tag.mapped_bytes, tag.total_bytes, tag.following_bytes


async def test_it_serves_with_the_least_cache_and_the_rest_follows(node: Node, rollout: RolloutClient) -> None:
    _, total, following = await kv_bytes(rollout)
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    await rollout.receive(node.trainer.publish(7))
    resumed = await rollout.resume(types_pb2.STAGE_RESUME_KV, KV)
    assert 0 < resumed.mapped_bytes == total - following < total / 4
    whole = await growth_until(rollout, is_whole)
    assert whole.num_tokens >= NUM_TOKENS
    assert (await kv_bytes(rollout))[0] == total
    assert await rollout.metric(KV_SERVED.name) == await rollout.metric(KV_CAPACITY.name) >= NUM_TOKENS


async def test_requests_wait_while_others_hold_the_memory_and_none_fails(node: Node, rollout: RolloutClient) -> None:
    await rollout.wake(node.trainer.publish(7))
    await growth_until(rollout, is_whole)
    alone = await rollout.generate([[5, 6, 7]], num_samples=2, max_new_tokens=200, temperature=0.0, ignore_eos=True)
    await rollout.sleep()

    _, total, following = await kv_bytes(rollout)
    weights = (await usage_of(rollout)).tags[0].total_bytes
    node.leave(weights + total - following + 3 * 4 * MIB)
    await rollout.wake(node.trainer.publish(7))
    short = await growth_until(rollout, is_short)
    assert short.is_growing and short.served_tokens < NUM_TOKENS / 4
    assert short.needed_bytes > short.free_bytes
    # Thirty-two samples of 200 tokens: many times what is served.
    samples = asyncio.ensure_future(
        rollout.generate([[5, 6, 7]], num_samples=32, max_new_tokens=200, temperature=0.0, ignore_eos=True)
    )
    await asyncio.sleep(0.5)
    held = await rollout.metric("tasuki_rollout_kv_tokens")
    assert held <= short.served_tokens
    node.hold(0)
    await growth_until(rollout, is_whole)
    made = await samples
    assert {tuple(sample.token_ids) for sample in made} == {tuple(sample.token_ids) for sample in alone}
    assert {sample.finish_reason for sample in made} == {types_pb2.FINISH_REASON_LENGTH}


async def test_growth_that_never_gets_room_is_told_and_rollout_serves_on(node: Node, rollout: RolloutClient) -> None:
    _, total, following = await kv_bytes(rollout)
    node.leave((await usage_of(rollout)).tags[0].total_bytes + total - following)
    await rollout.wake(node.trainer.publish(7))
    stalled = await growth_until(rollout, lambda state: state.is_stalled)
    assert stalled.is_growing and stalled.needed_bytes > 0 == stalled.free_bytes
    assert "event=kv_growth_stalled" in node.rollout.log.read_text()
    (sample,) = await rollout.generate([[5, 6, 7]], max_new_tokens=30, ignore_eos=True)
    assert len(sample.token_ids) == 30
    node.hold(0)
    assert not (await growth_until(rollout, is_whole)).is_stalled


async def test_a_drain_gives_back_what_the_last_samples_do_not_use(node: Node, rollout: RolloutClient) -> None:
    await rollout.wake(node.trainer.publish(7))
    await growth_until(rollout, is_whole)
    free = node.free_bytes
    _, total, following = await kv_bytes(rollout)
    long = asyncio.ensure_future(rollout.generate([[5, 6]], max_new_tokens=250, ignore_eos=True))
    while (await rollout.state()).num_running == 0:
        await asyncio.sleep(0.01)
    draining = asyncio.ensure_future(rollout.drain(grace_ms=60_000))
    while node.free_bytes == free:
        assert not long.done()
        await asyncio.sleep(0.01)
    assert (await draining).num_finished == 1
    assert len((await long)[0].token_ids) == 250
    released = node.free_bytes - free
    assert released >= following / 2
    paused = await rollout.pause(types_pb2.STAGE_PAUSE_KV, KV)
    assert paused.released_bytes == total - released


@only_whole
async def test_a_drain_that_is_taken_back_grows_again(node: Node, rollout: RolloutClient) -> None:
    await rollout.wake(node.trainer.publish(7))
    await growth_until(rollout, is_whole)
    first = await rollout.generate([[5, 6, 7]], max_new_tokens=30, temperature=0.0, ignore_eos=True)
    long = asyncio.ensure_future(rollout.generate([[5, 6]], max_new_tokens=250, ignore_eos=True))
    while (await rollout.state()).num_running == 0:
        await asyncio.sleep(0.01)
    await rollout.drain()
    await long
    await rollout.resume(types_pb2.STAGE_RESUME_KV, KV)
    await growth_until(rollout, is_whole)
    assert await rollout.generate([[5, 6, 7]], max_new_tokens=30, temperature=0.0, ignore_eos=True) == first


@only_whole
async def test_many_changeovers_leave_every_chunk_where_it_was(node: Node, rollout: RolloutClient) -> None:
    free = node.free_bytes
    for version in range(8, 8 + NUM_STEPS):
        await rollout.wake(node.trainer.publish(version))
        # In the middle of its growth as often as not.
        await rollout.generate([[5, 6, 7]], max_new_tokens=version - 7, ignore_eos=True)
        await rollout.sleep()
        assert node.free_bytes == free
