"""The front and its ranks, each in a process: answers, failures and deaths, and the front's report of them."""

import asyncio
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

import pytest

from tasuki.rollout.rank import RankLine, rank_address
from tasuki.rollout.rollout import RankCalls
from tasuki.rpc.ranks import CommandRunner, RankFront, RankServer, rank_error
from tasuki.v1.memory_pb2 import PauseResponse
from tasuki.v1.ranks_pb2 import EngineRankCommand, EngineRankResult, RankReady, TrainerRankCommand, TrainerRankResult
from tasuki.v1.trainer_pb2 import SaveCheckpointRequest, SaveCheckpointResponse
from tasuki.wire.errors import Busy, InternalError, OutOfGpuMemory, PeerUnavailable, TasukiError
from tests.integration import forked

Front: TypeAlias = RankFront[TrainerRankCommand, TrainerRankResult]
START_S = 60.0
STRAGGLER_S = 1.0


def work(request: SaveCheckpointRequest) -> SaveCheckpointResponse:
    """Acts as `path` says."""
    match request.path.split():
        case ["answer", number]:
            return SaveCheckpointResponse(bytes=int(number))
        case ["wait", seconds]:
            time.sleep(float(seconds))
        case ["refuse"]:
            raise Busy("requests run", num_running=3)
        case ["lack"]:
            raise OutOfGpuMemory("no room", needed_bytes=2, free_bytes=1)
        case ["tear"]:
            raise RuntimeError("torn")
        case _:
            os.kill(os.getpid(), signal.SIGKILL)
    return SaveCheckpointResponse()


def run_rank(address: str, rank: int) -> None:
    """Runs a rank until the front is gone."""
    server = RankServer(address, rank=rank)
    front_gone = server.front_gone()
    server.send(TrainerRankResult(rank=rank, ready=RankReady(pid=os.getpid())))
    runner = CommandRunner(TrainerRankResult, {"save_checkpoint": work}, rank)
    for one in server.commands(TrainerRankCommand, until=[front_gone]):
        server.send(runner.run(one))
    server.close()


def command(path: str) -> TrainerRankCommand:
    return TrainerRankCommand(save_checkpoint=SaveCheckpointRequest(path=path))


async def call_each(front: Front, *paths: str) -> list[int]:
    return [result.save_checkpoint.bytes for result in await front.call([command(path) for path in paths])]


def make_front(folder: Path, *, num_ranks: int) -> Front:
    front: Front = RankFront(folder / "ranks.sock", TrainerRankResult, service="test", num_ranks=num_ranks)
    front.straggler_timeout_s = STRAGGLER_S
    return front


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_S):
        while not is_so():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(folder: Path, *, num_ranks: int = 2) -> AsyncIterator[tuple[Front, Sequence[BaseProcess]]]:
    """A front whose ranks are all connected and watched."""
    front = make_front(folder, num_ranks=num_ranks)
    processes = [
        forked.processes.Process(target=run_rank, args=(front.address, rank), daemon=True) for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        await until(lambda: front.is_connected)
        for rank, process in enumerate(processes):
            assert process.pid is not None
            front.watch(rank, pid=process.pid)
        yield front, processes
    finally:
        front.close()
        for process in processes:
            process.kill()
            process.join()


async def test_each_rank_answers_its_own_command_in_order_and_leaves_with_the_front(tmp_path: Path) -> None:
    path = tmp_path / "ranks.sock"
    async with running(tmp_path, num_ranks=3) as (front, processes):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await call_each(front, "answer 5", "answer 7", "answer 9") == [5, 7, 9]
        results = await front.call(command("answer 4"))
        assert [(result.rank, result.save_checkpoint.bytes) for result in results] == [(0, 4), (1, 4), (2, 4)]
        front.close()
        assert not path.exists()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0


async def test_noise_at_the_socket_is_ignored(tmp_path: Path) -> None:
    async with running(tmp_path) as (front, _):
        for noise in (b"\x01\x00\x03\x00\xff\xff", b"\x01\x00\x01\x00" * 5, os.urandom(200)):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(tmp_path / "ranks.sock"))
                stranger.sendall(noise)
                assert await call_each(front, "answer 1", "answer 2") == [1, 2]


async def test_an_error_of_all_ranks_is_raised_as_it_is_and_the_next_call_is_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as (front, _):
        with pytest.raises(Busy, match="^requests run$") as caught:
            await call_each(front, "refuse", "refuse")
        assert caught.value.metadata == {"num_running": "3"}
        assert not front.broken.is_set()
        assert await call_each(front, "answer 1", "answer 2") == [1, 2]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("answer 1", "refuse"), "test rank 1 failed: requests run"),
        (("refuse", "lack"), "test rank 0 failed: requests run"),
        (("tear", "tear"), "test rank 0 failed: RuntimeError: torn"),
    ],
)
async def test_ranks_that_disagree_or_fail_for_no_known_reason_are_broken(tmp_path: Path, paths: tuple[str, str], message: str):
    async with running(tmp_path) as (front, _):
        for asked in (paths, ("answer 1", "answer 2")):
            with pytest.raises(InternalError, match=f"^{message}$"):
                await call_each(front, *asked)
        assert front.broken.is_set()


async def test_engine_ranks_may_fail_alone_and_a_lack_of_memory_is_told_last(tmp_path: Path) -> None:
    errors: list[TasukiError | None] = [OutOfGpuMemory("no room", needed_bytes=2, free_bytes=1), InternalError("torn")]

    def run(rank: int, one: EngineRankCommand) -> EngineRankResult:
        result = EngineRankResult(call=one.call, rank=rank, pause=PauseResponse(released_bytes=rank + 3))
        if (error := errors[rank]) is not None:
            result.error.CopyFrom(rank_error(error))
        return result

    calls = RankCalls(2, socket_dir=tmp_path)
    lines = [RankLine(rank_address(tmp_path), rank=rank, run=partial(run, rank)) for rank in range(2)]
    try:
        with pytest.raises(InternalError, match="^engine rank 1: torn$"):
            await calls.pause([], timeout_s=START_S)
        assert not calls.broken.is_set()
        errors[:] = [None, None]
        assert await calls.pause([], timeout_s=START_S) == 3 + 4
    finally:
        for line in lines:
            line.close()
        calls.close()
    assert "front-line" not in {thread.name for thread in threading.enumerate()}


async def test_a_rank_that_waits_for_one_that_failed_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path) as (front, _):
        with pytest.raises(
            InternalError, match=r"^test ranks \[1\] do not answer after another rank failed: rank 0: requests run$"
        ):
            await call_each(front, "refuse", "wait 30")
        assert front.broken.is_set()


async def test_a_rank_that_dies_in_a_call_ends_it_and_is_named(tmp_path: Path) -> None:
    async with running(tmp_path) as (front, processes):
        for paths in (("wait 300", "die"), ("answer 1", "answer 2")):
            with pytest.raises(PeerUnavailable, match=rf"^test rank 1 \(pid {processes[1].pid}\) is gone") as caught:
                await asyncio.wait_for(call_each(front, *paths), 60)
            assert caught.value.metadata == {"rank": "1"}


async def test_the_peer_of_a_killed_rank_fails_and_the_killed_one_is_named(tmp_path: Path) -> None:
    async with running(tmp_path) as (front, _):
        with pytest.raises(PeerUnavailable, match="^test rank 1 "):
            await call_each(front, "tear", "die")


def fail_in_a_line(socket_dir: Path) -> None:
    def run(one: EngineRankCommand) -> EngineRankResult:
        raise RuntimeError("outside CommandRunner")

    RankLine(rank_address(socket_dir), rank=0, run=run)
    signal.pause()


async def test_a_rank_whose_line_fails_ends(tmp_path: Path) -> None:
    front = RankCalls(1, socket_dir=tmp_path)
    rank = forked.processes.Process(target=fail_in_a_line, args=(tmp_path,), daemon=True)
    rank.start()
    try:
        call = asyncio.ensure_future(front.call(EngineRankCommand()))
        await asyncio.to_thread(rank.join, START_S)
        assert rank.exitcode == 1
        call.cancel()
    finally:
        rank.kill()
        front.close()
