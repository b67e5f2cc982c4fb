"""Published weights in a pool's chunks that leave and come back: a reader imports each chunk once, and maps it at each sync."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tasuki.memory.arena import totals
from tasuki.memory.pool import PoolKeeper
from tasuki.rollout.receive import WeightReceiver
from tasuki.transport import fd_socket
from tasuki.transport.imported_weights import import_weights
from tasuki.v1 import weights_pb2
from tasuki.wire.errors import BadHandle
from tests.integration.pooled_rank import Model, PooledRank

MIB = 1 << 20
NUM_ROWS, NUM_CHUNKS = 1024, 2


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], PooledRank]]:
    """Starts processes on one pool."""
    with ExitStack() as stack:
        keeper = PoolKeeper(32 * MIB, device="cpu", chunk_bytes=2 * MIB)
        stack.callback(keeper.close)

        def started() -> PooledRank:
            rank = PooledRank(tmp_path, NUM_ROWS, device="cpu", fds=keeper.fds)
            stack.callback(rank.close)
            return rank

        yield started


def num_places(weights: weights_pb2.PublishedWeights) -> int:
    """Checks that each chunk is sent with its place, and counts them."""
    message, fds = fd_socket.fetch(Path(weights.handles[0].socket_path), timeout_s=20)
    for fd in fds:
        os.close(fd)
    sent = weights_pb2.WeightManifest.FromString(message)
    assert len(sent.places) == len(sent.chunk_bytes) and len({place.pool for place in sent.places} - {0}) == 1
    return len({place.index for place in sent.places})


def test_a_reader_outside_the_pool_imports_each_chunk_once(start: Callable[[], PooledRank]) -> None:
    trainer, receiver = start(), WeightReceiver(Model(NUM_ROWS, device="cpu"))
    held, imported = totals().imported_bytes, totals().num_imported_chunks
    for version in range(3):
        weights = trainer.publish(version)
        receiver.receive(weights, import_timeout_s=20)
        assert receiver.model.weight.unique().tolist() == [version + 1]
        assert totals().num_imported_chunks == imported + NUM_CHUNKS == imported + num_places(weights)
        assert totals().imported_bytes == held
        trainer.come_back()


def test_handles_that_were_kept_do_not_open_memory_that_is_away(start: Callable[[], PooledRank]) -> None:
    trainer = start()
    weights = trainer.publish(0)
    for reader in (start(), start()):
        assert reader.read(weights) == (1, 0)
    imported = import_weights(weights, timeout_s=20)
    imported.release()
    trainer("offload")
    with pytest.raises(BadHandle, match="shares nothing now"):
        imported.hold(weights, timeout_s=20)
    imported.close()


def test_readers_in_the_pool_import_none(start: Callable[[], PooledRank]) -> None:
    trainer, readers = start(), [start(), start()]
    for version in range(3):
        weights = trainer.publish(version)
        assert [reader.read(weights) for reader in readers] == [(version + 1, 0)] * 2
        trainer.come_back()


def test_closing_releases_the_handles_that_were_kept(start: Callable[[], PooledRank]) -> None:
    weights, imported = start().publish(0), totals().num_imported_chunks
    before = len(os.listdir("/proc/self/fd"))
    reader = import_weights(weights, timeout_s=20)
    reader.release()
    assert len(os.listdir("/proc/self/fd")) > before, "handles of a host's chunks are descriptors"
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
    import_weights(weights, timeout_s=20).close()
    assert totals().num_imported_chunks == imported + 2 * NUM_CHUNKS
