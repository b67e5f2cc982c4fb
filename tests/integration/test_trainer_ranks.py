"""Life of a trainer rank, in processes without a model: start, stop, and end with its launcher."""

import asyncio
import os
import socket
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tasuki.rpc.failpoints import NO_FAILPOINTS
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.ranks import Handlers, RankServer, rank_error
from tasuki.trainer.rank import run_rank_commands
from tasuki.trainer.ranks import TrainerRanks, ranks_path
from tasuki.v1.ranks_pb2 import RankReady, TrainerRankResult
from tasuki.wire.errors import PathNotFound
from tests.integration import forked

# A close takes at most the linger time of 0.2 s, and 0.5 s if libzmq waits forever.
SLOW_S, CLOSE_S = 0.4, 10.0


def run(folder: str, rank: int, launcher: int, *, fails: bool) -> None:
    """Exits with 0 if the rank was told to stop or its launcher ended; with 3 if it could not start."""

    def start() -> tuple[RankReady, Handlers]:
        if fails:
            raise PathNotFound("no model")
        return RankReady(vocab_size=7), {}

    heartbeat = Heartbeat(Path(folder), f"trainer{rank}")
    has_served = run_rank_commands(
        start,
        rank=rank,
        front=ranks_path(Path(folder), "launch"),
        launcher_fd=os.pidfd_open(launcher),
        heartbeat=heartbeat,
        failpoints=NO_FAILPOINTS,
    )
    heartbeat.close()
    sys.exit(0 if has_served else 3)


def start_ranks(folder: Path, launcher: int, *, fails: bool = False) -> list[BaseProcess]:
    processes: list[BaseProcess] = [
        forked.processes.Process(target=run, args=(str(folder), rank, launcher), kwargs={"fails": fails}, daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    return processes


def exit_codes(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(60)
        process.kill()
    return [process.exitcode for process in processes]


async def test_ranks_report_and_leave_when_they_are_told(tmp_path: Path) -> None:
    front = TrainerRanks(socket_dir=tmp_path, launch_id="launch", num_ranks=2, collective_timeout_s=1.0)
    processes = start_ranks(tmp_path, os.getpid())
    assert (await asyncio.wait_for(front.ready(), 60)).vocab_size == 7
    await front.stop()
    assert exit_codes(processes) == [0, 0]


async def test_ranks_do_not_meet_a_killed_trainers_front(tmp_path: Path) -> None:
    """It listens until its process has ended."""
    killed = socket.socket(socket.AF_UNIX)
    killed.bind(str(ranks_path(tmp_path, "killed")))
    killed.listen()
    processes = start_ranks(tmp_path, os.getpid())
    time.sleep(0.5)
    front = TrainerRanks(socket_dir=tmp_path, launch_id="launch", num_ranks=2, collective_timeout_s=1.0)
    killed.close()
    await asyncio.wait_for(front.ready(), 60)
    assert [path.name for path in tmp_path.glob("*.sock")] == ["trainer-launch.sock"]
    await asyncio.sleep(0.5)
    assert all(process.is_alive() for process in processes)
    await front.stop()
    assert exit_codes(processes) == [0, 0]


async def test_the_error_of_a_failed_start_reaches_the_front(tmp_path: Path) -> None:
    front = TrainerRanks(socket_dir=tmp_path, launch_id="launch", num_ranks=2, collective_timeout_s=1.0)
    processes = start_ranks(tmp_path, os.getpid(), fails=True)
    with pytest.raises(PathNotFound, match="^no model$"):
        await asyncio.wait_for(front.ready(), 60)
    front.close()
    assert exit_codes(processes) == [3, 3]


async def test_a_front_closes_whose_rank_leaves_while_it_is_told_to_stop(tmp_path: Path) -> None:
    """Some such ends make libzmq wait forever; the test ends with the first."""

    def fail() -> None:
        rank = RankServer(f"ipc://{ranks_path(tmp_path, 'launch')}", rank=0)
        rank.send(TrainerRankResult(rank=0, error=rank_error(PathNotFound("no model"))))
        rank.close()

    seconds = 0.0
    for _ in range(400):
        front = TrainerRanks(socket_dir=tmp_path, launch_id="launch", num_ranks=1, collective_timeout_s=1.0)
        leaving = threading.Thread(target=fail)
        leaving.start()
        with pytest.raises(PathNotFound):
            await front.ready()
        started = time.monotonic()
        await front.stop()
        seconds = max(seconds, time.monotonic() - started)
        leaving.join()
        if seconds > SLOW_S:
            break
    assert seconds < CLOSE_S
