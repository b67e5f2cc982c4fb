"""A real engine whose KV cache grows on demand, beside a process that holds the memory it grows into."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tasuki.config.places import pool_socket_path
from tasuki.memory.pool import PoolKeeper
from tasuki.rollout.growing_cache import NUM_PARTS
from tasuki.rpc.metric_names import KV_CAPACITY, KV_SERVED
from tasuki.transport.pool_socket import PoolServer
from tasuki.v1 import types_pb2
from tasuki.v1.rollout_pb2 import KvCacheState
from tests.conftest import ENVIRONMENT
from tests.extent import IS_WHOLE, only_whole
from tests.integration.rollout_process import (
    RolloutClient,
    RolloutProcess,
    TestTrainer,
    connected,
    log_probs_of,
    start_rollout,
    start_samples,
    stop_rollout,
    wait_until_serving,
)
from tests.integration.test_rollout_memory import usage_of
from tests.models import VOCAB_SIZE, make_model

pytestmark = pytest.mark.timeout(600)
KV, WEIGHTS = types_pb2.MEMORY_TAG_KV_CACHE, types_pb2.MEMORY_TAG_WEIGHTS
MIB = 1 << 20
# 2 layers, keys and values, 2 heads of 16, bfloat16: 128 MiB.
NUM_TOKENS = (128 * MIB) // (2 * 2 * 2 * 16 * 2)
POOL_BYTES = 192 * MIB
STALL_S = 1.0
TP_SIZE = 2 if IS_WHOLE else 1
NUM_MANY = 600
# With two ranks more of them fit into the mapped chunks, and end sooner.
NUM_WAITING = 8000 if IS_WHOLE else 2000
# Enough samples to reserve 30 % of the cache at full length. They end with their first token.
MANY = {
    "prompts": [[5, 6, 7]], "num_samples": NUM_MANY, "max_new_tokens": 250, "stop_token_ids": list(range(VOCAB_SIZE)), "temperature": 1.0,
}  # fmt: skip


class Node:
    """A rollout service and a holder of memory, over a pool that this process keeps."""

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
            f"rollout.tp_size={TP_SIZE}",
            f"restart.stall_s={STALL_S}",
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
        """Holds all free chunks except those of `num_bytes`."""
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


def is_short(state: KvCacheState) -> bool:
    return state.needed_bytes > 0


async def kv_bytes(rollout: RolloutClient) -> tuple[int, int, int]:
    """Mapped bytes, total bytes, and bytes not mapped by a resume, over all ranks."""
    tags = [one for one in (await usage_of(rollout)).tags if one.tag == KV]
    assert len(tags) == TP_SIZE
    return sum(tag.mapped_bytes for tag in tags), sum(tag.total_bytes for tag in tags), sum(tag.following_bytes for tag in tags)


async def weight_bytes(rollout: RolloutClient) -> int:
    return sum(one.total_bytes for one in (await usage_of(rollout)).tags if one.tag == WEIGHTS)


def check_log_probs(node: Node, samples: Sequence[types_pb2.Sample], *, prompt: list[int]) -> None:
    """Cached tokens survive to a sample's end: transformers, without a cache, gives the same log-probs."""
    for sample in samples:
        theirs = log_probs_of(node.trainer.model, prompt, list(sample.token_ids))
        assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=0.15)


async def test_it_serves_with_the_least_cache_and_maps_what_requests_may_need(node: Node, rollout: RolloutClient) -> None:
    _, total, following = await kv_bytes(rollout)
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    await rollout.receive(node.trainer.publish(7))
    resumed = await rollout.resume(types_pb2.STAGE_RESUME_KV, KV)
    assert resumed.mapped_bytes == total - following < total / 4
    least = (await growth_until(rollout, lambda state: state.served_tokens > 0)).served_tokens
    await rollout.generate([[5, 6, 7]], max_new_tokens=20, ignore_eos=True)
    assert (await kv_bytes(rollout))[0] == resumed.mapped_bytes
    await rollout.generate(**MANY)
    grown = (await rollout.state()).kv_cache
    assert least < NUM_MANY * 255 <= grown.served_tokens <= NUM_MANY * 255 + 1.25 * grown.num_tokens / NUM_PARTS + 1
    assert not grown.is_growing and grown.num_tokens >= NUM_TOKENS
    mapped, _, _ = await kv_bytes(rollout)
    assert resumed.mapped_bytes < mapped < 0.8 * total
    assert await rollout.metric(KV_SERVED.name) == grown.served_tokens
    assert await rollout.metric(KV_CAPACITY.name) == grown.num_tokens
    # As many again fit into the memory of the first ones.
    await rollout.generate(**MANY)
    assert (await kv_bytes(rollout))[0] == mapped
    await rollout.drain()
    assert (await rollout.pause(types_pb2.STAGE_PAUSE_KV, KV)).released_bytes == mapped


async def test_requests_wait_while_others_hold_the_memory_and_none_fails(node: Node, rollout: RolloutClient) -> None:
    """The needed memory is reported, and the wait counts as stalled if it does not come."""
    _, total, following = await kv_bytes(rollout)
    node.leave(await weight_bytes(rollout) + total - following)
    await rollout.wake(node.trainer.publish(7))
    # One of them finds room at once.
    many = asyncio.ensure_future(rollout.generate(**{**MANY, "num_samples": NUM_WAITING}))
    short = await growth_until(rollout, is_short)
    assert short.is_growing and short.served_tokens < short.needed_tokens
    assert short.needed_bytes > short.free_bytes
    assert await rollout.metric("tasuki_rollout_kv_tokens") <= short.served_tokens
    samples = asyncio.ensure_future(rollout.generate([[5, 6, 7]], num_samples=4, max_new_tokens=200, ignore_eos=True))
    assert (await growth_until(rollout, lambda state: state.is_stalled)).is_growing
    assert "event=kv_growth_stalled" in node.rollout.log.read_text()
    assert not many.done()
    node.hold(0)
    grown = await growth_until(rollout, lambda state: not state.is_growing)
    assert not grown.is_stalled and grown.served_tokens > short.served_tokens
    made = await samples
    assert {(sample.finish_reason, len(sample.token_ids)) for sample in made} == {(types_pb2.FINISH_REASON_LENGTH, 200)}
    check_log_probs(node, made, prompt=[5, 6, 7])
    assert len(await many) == NUM_WAITING


async def test_the_last_call_gives_the_cache_back_as_its_samples_end_and_a_later_one_grows_it_again(
    node: Node, rollout: RolloutClient
) -> None:
    await rollout.wake(node.trainer.publish(7))
    await rollout.generate(**MANY)
    mapped, total, following = await kv_bytes(rollout)
    assert (await rollout.state()).kv_cache.served_tokens > NUM_MANY * 250, "it was not the last call"
    long = await start_samples(rollout, num_samples=8)
    last = asyncio.ensure_future(rollout.generate(**MANY, is_last=True))
    async with asyncio.timeout(60):
        while (await kv_bytes(rollout))[0] > mapped - (mapped - (total - following)) / 2:
            await asyncio.sleep(0.01)
    assert (await rollout.state()).stage == types_pb2.STAGE_RESUME_KV, "before DRAIN"
    # Another process takes the freed memory: later requests wait for room, as for any growth, and none of them fails.
    node.hold(node.free_bytes)
    later = asyncio.ensure_future(rollout.generate(**{**MANY, "num_samples": NUM_WAITING}))
    await growth_until(rollout, is_short)
    node.hold(0)
    made = await long
    assert {len(sample.token_ids) for sample in made} == {250}
    check_log_probs(node, made, prompt=[5, 6])
    assert (len(await last), len(await later)) == (NUM_MANY, NUM_WAITING)
    assert "Retract" not in node.rollout.log.read_text()
    await growth_until(rollout, lambda state: not state.is_growing)
    await rollout.drain()
    mapped, _, _ = await kv_bytes(rollout)
    assert (await rollout.pause(types_pb2.STAGE_PAUSE_KV, KV)).released_bytes == mapped


async def test_a_drain_gives_back_what_the_last_samples_cannot_need(node: Node, rollout: RolloutClient) -> None:
    await rollout.wake(node.trainer.publish(7))
    await rollout.generate(**MANY)
    mapped, total, following = await kv_bytes(rollout)
    free = node.free_bytes
    # More than the smallest cache serves: they must be neither evicted nor delayed.
    long = await start_samples(rollout, num_samples=8)
    draining = asyncio.ensure_future(rollout.drain(grace_ms=60_000))
    async with asyncio.timeout(60):
        while node.free_bytes == free:
            await asyncio.sleep(0.01)
    drained, made = await draining, await long
    assert (drained.num_finished, {len(sample.token_ids) for sample in made}) == (8, {250})
    check_log_probs(node, made, prompt=[5, 6])
    assert drained.released_bytes == node.free_bytes - free >= (mapped - (total - following)) / 2
    assert "Retract" not in node.rollout.log.read_text()
    paused = await rollout.pause(types_pb2.STAGE_PAUSE_KV, KV)
    assert paused.released_bytes == mapped - drained.released_bytes


@only_whole
async def test_a_drain_that_is_taken_back_grows_again(node: Node, rollout: RolloutClient) -> None:
    await rollout.wake(node.trainer.publish(7))
    first = await rollout.generate([[5, 6, 7]], max_new_tokens=30, temperature=0.0, ignore_eos=True)
    await rollout.generate(**MANY)
    mapped, _, _ = await kv_bytes(rollout)
    long = await start_samples(rollout)
    await rollout.drain()
    await long
    await rollout.resume(types_pb2.STAGE_RESUME_KV, KV)
    assert await rollout.generate([[5, 6, 7]], max_new_tokens=30, temperature=0.0, ignore_eos=True) == first
    assert (await kv_bytes(rollout))[0] < mapped
    await rollout.generate(**MANY)
    assert (await kv_bytes(rollout))[0] == mapped


@only_whole
async def test_many_changeovers_leave_every_chunk_where_it_was(node: Node, rollout: RolloutClient) -> None:
    free = node.free_bytes
    for version in range(8, 24):
        await rollout.wake(node.trainer.publish(version))
        await rollout.generate(**{**MANY, "num_samples": 40 * (version - 7)})
        await rollout.sleep()
        assert node.free_bytes == free
