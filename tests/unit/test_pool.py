"""A pool of chunks shared by several processes: whatever they do and whichever is killed, a chunk has at most one writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tasuki.memory import arena as native
from tasuki.memory.arena import Access, Arena, Export, Import, Keep
from tasuki.memory.pool import Identity, PoolKeeper, close_pool, open_pool, pool_bytes, pool_chunk_bytes, pool_usage
from tasuki.transport.pool_socket import PoolServer, join_pool
from tasuki.wire.errors import BadHandle, Busy, OutOfGpuMemory, WrongPhase
from tests.arenas import pause, resume
from tests.extent import examples

CHUNK = 64 << 10
NUM_CHUNKS = 6
_devices = count(100)


def sleeping() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


def writable_mappings(keeper: PoolKeeper) -> dict[int, int]:
    """Maps each chunk to the number of its writable mappings in this process, from the kernel."""
    chunks = {os.fstat(fd).st_ino: index for index, fd in enumerate(keeper.fds[1:])}
    found: dict[int, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, offset, _, inode, *_ = line.split()
        if "w" in access and int(inode) in chunks:
            start, end = (int(part, 16) for part in span.split("-"))
            for index in range(int(offset, 16), int(offset, 16) + end - start, CHUNK):
                assert index == 0
            found[chunks[int(inode)]] = found.get(chunks[int(inode)], 0) + 1
    return found


class Side:
    """One process of a node: arenas with another device number, in the name of a real process that can be killed."""

    def __init__(self, keeper: PoolKeeper) -> None:
        self.process = sleeping()
        self.device = f"cpu:{next(_devices)}"
        open_pool(keeper.fds, device=self.device, identity=Identity.of(self.process.pid))
        self.arena = Arena("weights", device=self.device)
        self.blocks: list[tuple[int, int]] = []
        self.imports: list[Import] = []
        self.exports: list[Export] = []

    @property
    def is_asleep(self) -> bool:
        return self.arena.usage().mapped_bytes == 0 and bool(self.blocks)

    def leave(self) -> None:
        for one in self.imports:
            one.close()
        for export in self.exports:
            export.close()
        for address, _ in self.blocks:
            self.arena.free(address)
        self.arena.close()
        close_pool(self.device)
        self.process.kill()
        self.process.wait()


sides = st.integers(0, 2)


class PoolMachine(RuleBasedStateMachine):
    """Three processes that take, sleep, wake, publish, read and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = PoolKeeper(NUM_CHUNKS * CHUNK, device="cpu", chunk_bytes=CHUNK)
        self.sides = [Side(self.keeper) for _ in range(3)]

    def teardown(self) -> None:
        for side in self.sides:
            side.leave()
        assert self.keeper.usage().num_free == NUM_CHUNKS
        self.keeper.close()

    @rule(side=sides, num_chunks=st.integers(1, 4), stamp=st.integers(1, 255))
    def allocate(self, side: int, num_chunks: int, stamp: int) -> None:
        one, free = self.sides[side], self.keeper.usage().num_free
        try:
            address = one.arena.allocate(num_chunks * CHUNK)
        except OutOfGpuMemory:
            assert free < num_chunks
            return
        except WrongPhase:
            assert one.arena.usage().state is native.ArenaState.PAUSED
            return
        one.blocks.append((address, num_chunks * CHUNK))
        memoryview(one.arena.view(address, num_chunks * CHUNK)).cast("B")[:] = bytes([stamp]) * num_chunks * CHUNK

    @rule(side=sides)
    def free(self, side: int) -> None:
        one = self.sides[side]
        if one.blocks:
            one.arena.free(one.blocks.pop()[0])

    @rule(side=sides, keep=st.sampled_from([Keep.NOTHING, Keep.CONTENT, Keep.CHUNKS]))
    def pause(self, side: int, keep: Keep) -> None:
        self.sides[side].arena.set_policy(keep)
        pause([self.sides[side].arena])

    @rule(side=sides)
    def resume(self, side: int) -> None:
        one, before = self.sides[side], self.keeper.usage()
        usage = one.arena.usage()
        lacking = (usage.total_bytes - usage.mapped_bytes - usage.kept_bytes) // CHUNK
        if usage.state is native.ArenaState.PAUSED and lacking > before.num_free:
            with pytest.raises(OutOfGpuMemory) as refused:
                resume([one.arena])
            assert int(refused.value.metadata["needed_bytes"]) == lacking * CHUNK
            assert self.keeper.usage() == before
        else:
            resume([one.arena])

    @rule(side=sides, reader=sides)
    def publish_and_read(self, side: int, reader: int) -> None:
        one = self.sides[side]
        try:
            export = one.arena.export(Access.READ_ONLY)
        except WrongPhase:
            return
        with suppress(Busy):  # as many readers as the table has words
            self.sides[reader].imports.append(Import(export.chunks, device=self.sides[reader].device, access=Access.READ_ONLY))
        one.exports.append(export)
        export.close_fds()

    @rule(side=sides)
    def stop_reading(self, side: int) -> None:
        if self.sides[side].imports:
            self.sides[side].imports.pop().close()

    @rule(side=sides)
    def reclaim_takes_nothing_from_the_living(self, side: int) -> None:
        os.kill(self.sides[side].process.pid, signal.SIGSTOP)
        before = self.keeper.usage()
        assert self.keeper.reclaim() == 0 and self.keeper.usage() == before

    @invariant()
    def a_chunk_has_at_most_one_writer(self) -> None:
        writers = writable_mappings(self.keeper)
        assert all(times == 1 for times in writers.values())
        assert len(writers) == self.keeper.usage().num_mapped

    @invariant()
    def every_chunk_is_accounted_for(self) -> None:
        usage = self.keeper.usage()
        held = sum((one.arena.usage().mapped_bytes + one.arena.usage().kept_bytes) // CHUNK for one in self.sides)
        assert usage.num_mapped + usage.num_lent == held
        assert usage.num_free <= NUM_CHUNKS - held


PoolMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase

WORKER = """
import sys, time
from pathlib import Path
from tasuki.memory.arena import Arena
from tasuki.transport.pool_socket import join_pool
join_pool(Path(sys.argv[1]), device="cpu", timeout_s=20)
arena = Arena("weights", device="cpu")
held = arena.buffer(int(sys.argv[2]))
print("holds", flush=True)
time.sleep(600)
"""


@pytest.fixture
def keeper() -> Iterator[PoolKeeper]:
    made = PoolKeeper(NUM_CHUNKS * CHUNK, device="cpu", chunk_bytes=CHUNK)
    yield made
    made.close()


def worker(path: Path, num_bytes: int, server: PoolServer) -> subprocess.Popen[str]:
    roots = Path(native.__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path), str(num_bytes)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{roots}:{roots.parent / 'protos'}"},
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    while process.poll() is None and not process.stdout.readline():
        server.poll()
    return process


def test_chunks_of_a_killed_process_come_back_after_its_death_and_not_while_it_is_stopped(
    keeper: PoolKeeper, tmp_path: Path
) -> None:
    server = PoolServer(keeper, tmp_path / "pool.sock")
    process = worker(tmp_path / "pool.sock", 4 * CHUNK, server)
    try:
        assert process.poll() is None and (tmp_path / "pool.sock").stat().st_mode & 0o777 == 0o600
        assert keeper.usage().num_mapped == 4
        process.send_signal(signal.SIGSTOP)
        server.poll()
        assert keeper.usage().num_free == 2
    finally:
        process.kill()
    process.wait()
    server.poll()
    assert keeper.usage().num_free == NUM_CHUNKS
    server.close()


def test_a_pool_that_the_machine_has_no_room_for_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfGpuMemory, match="for the pool") as refused:
        PoolKeeper(1 << 50, device="cpu", chunk_bytes=1 << 40)
    assert int(refused.value.metadata["needed_bytes"]) == 1 << 50
    assert 0 < int(refused.value.metadata["free_bytes"]) < 1 << 50


def test_a_socket_that_nobody_serves_is_a_clean_error(tmp_path: Path) -> None:
    with pytest.raises(BadHandle, match="gave no descriptor"):
        join_pool(tmp_path / "pool.sock", device="cpu:77", timeout_s=0.1)
    assert pool_usage("cpu:77") is None


def test_chunks_are_few_enough_for_one_message_and_hold_the_size_in_whole() -> None:
    for size in (1, 2 << 20, 300 << 20, 1 << 30, 141 << 30):
        chunk = pool_chunk_bytes(size)
        assert 1 <= pool_bytes(size) // chunk <= 252
        assert size < chunk or size - chunk < pool_bytes(size) <= size


def test_hundreds_of_changeovers_leave_descriptors_and_mappings_as_they_were(keeper: PoolKeeper) -> None:
    trainer, rollout = Side(keeper), Side(keeper)
    trainer.blocks.append((trainer.arena.allocate(4 * CHUNK), 4 * CHUNK))
    pause([trainer.arena])
    rollout.blocks.append((rollout.arena.allocate(5 * CHUNK), 5 * CHUNK))

    def footprint() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())

    seen: list[tuple[int, int]] = []
    for number in range(300):
        pause([rollout.arena])
        resume([trainer.arena])
        pause([trainer.arena])
        resume([rollout.arena])
        if number in (10, 299):
            seen.append(footprint())
    assert seen[0] == seen[1]
    for side in (trainer, rollout):
        with suppress(ProcessLookupError):
            side.leave()
