"""A sync that ends after k of its n copies, for every k: its version is never served, and a fresh rank gets the published weights."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tasuki.rollout.rollout import RankCalls, Rollout
from tasuki.rollout.sync import WeightSync
from tasuki.v1 import weights_pb2
from tasuki.wire.errors import EnginePoisoned, TasukiError, WeightsCorrupt
from tasuki.wire.stages import MemoryTag, Stage
from tests.extent import IS_WHOLE
from tests.integration.breaking_rank import Break, Breaking, BreakingRank, digest_of
from tests.integration.published import Published
from tests.unit.test_rollout_stages import NO_SEEDS, IdleEngine, said, samples

VERSION = 3


class PublishedModel(Published):
    """A model as published, and what an engine must hold of it."""

    def __init__(self, socket_dir: Path, stack: ExitStack) -> None:
        super().__init__("qwen2", socket_dir, stack)
        tensors = load_file(self.folder / "model.safetensors")
        self.socket_dir, self.digest = socket_dir, digest_of(tensors)
        self.shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]


@pytest.fixture(scope="module")
def published() -> Iterator[PublishedModel]:
    with ExitStack() as stack:
        yield PublishedModel(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tasuki-"))), stack)


@asynccontextmanager
async def rollout_with(published: PublishedModel, breaking: Breaking | None) -> AsyncIterator[tuple[Rollout, BreakingRank]]:
    """The rollout service's state, memory and sync over one rank's process, with its weights awake."""
    rank = BreakingRank(published.shapes, breaking, socket_dir=published.socket_dir)
    calls = RankCalls(1, socket_dir=published.socket_dir)
    sync = WeightSync(calls, socket_dir=published.socket_dir)
    try:
        rollout = Rollout(IdleEngine(), sync, calls, seeds=NO_SEEDS, on_serving=said, on_poison=lambda: None)
        await rollout.fall_asleep(timeout_s=30)
        await rollout.resume(Stage.RESUME_WEIGHTS, [MemoryTag.WEIGHTS], timeout_s=30)
        yield rollout, rank
    finally:
        sync.close()
        calls.close()
        rank.close()


async def serve(rollout: Rollout) -> list[int]:
    await rollout.resume(Stage.RESUME_KV, [MemoryTag.KV_CACHE], timeout_s=30)
    return await samples(rollout)


async def assert_never_served(rollout: Rollout) -> None:
    assert (rollout.policy_version, rollout.received_version) == (None, None)
    assert rollout.poison_reason is not None
    with pytest.raises(EnginePoisoned):
        await serve(rollout)
    with pytest.raises(EnginePoisoned):
        await samples(rollout)
    with pytest.raises(EnginePoisoned):
        await rollout.receive(weights_pb2.PublishedWeights(policy_version=VERSION), timeout_s=5)


async def assert_a_fresh_rank_serves_it(published: PublishedModel) -> int:
    """Syncs a fresh rank and checks its values; returns the number of copies in a sync."""
    async with rollout_with(published, None) as (rollout, rank):
        await rollout.receive(published.message, timeout_s=30)
        digest, num_copies = rank.holds()
        assert digest == published.digest
        assert await serve(rollout) == [VERSION]
    return num_copies


@pytest.mark.parametrize("how", [Break.KILL, Break.RAISE, Break.SKIP])
async def test_sync_that_ends_early_is_never_served_and_a_fresh_one_is_exact(how: Break, published: PublishedModel) -> None:
    num_copies = await assert_a_fresh_rank_serves_it(published)
    assert num_copies == 2 * len(published.shapes)  # from both trainer ranks
    # Killed or raising after its last copy, a rank has verified nothing yet. SKIP needs a copy to skip.
    places = range(0, num_copies + (how is not Break.SKIP), 1 if how is Break.KILL else 5)
    for num_made in places if IS_WHOLE else (0, places[len(places) // 2], places[-1]):
        async with rollout_with(published, Breaking(how, num_made)) as (rollout, rank):
            with pytest.raises(TasukiError) as broken:
                # A killed rank gives no answer; in a node the service ends with it.
                await rollout.receive(published.message, timeout_s=0.25 if how is Break.KILL else 30)
            await assert_never_served(rollout)
            if how is Break.KILL:
                assert rank.exit_code == -9
                continue
            if how is Break.SKIP:
                assert isinstance(broken.value, WeightsCorrupt), num_made
            digest, _ = rank.holds()
            assert (digest == published.digest) is (num_made == num_copies)
            await rollout.pause(Stage.PAUSE_WEIGHTS, [MemoryTag.WEIGHTS], timeout_s=30)
            assert rollout.poison_reason is not None
        if num_made % 7 == 0:
            await assert_a_fresh_rank_serves_it(published)
    await assert_a_fresh_rank_serves_it(published)


async def test_every_replica_must_hold_every_tensor(published: PublishedModel) -> None:
    """The second replica's model lacks a tensor that the first one holds."""
    missing, _ = published.shapes[-1]
    for models in ([published.shapes] * 2, [published.shapes, published.shapes[:-1]]):
        ranks = [BreakingRank(shapes, socket_dir=published.socket_dir, rank=rank) for rank, shapes in enumerate(models)]
        calls = RankCalls(2, socket_dir=published.socket_dir)
        sync = WeightSync(calls, socket_dir=published.socket_dir, num_replicas=2)
        try:
            imported = await sync.prepare(published.message)
            if models[0] is models[1]:
                await sync.run(published.message, imported, timeout_s=30)
                assert [rank.holds()[0] for rank in ranks] == [published.digest] * 2
            else:
                with pytest.raises(WeightsCorrupt, match=f"{missing}: no engine rank reads it"):
                    await sync.run(published.message, imported, timeout_s=30)
        finally:
            sync.close()
            calls.close()
            for rank in ranks:
                rank.close()
