"""The engine ranks' processes.

Importing SGLang takes many seconds. On a CPU the front imports it once and forks its ranks. A CUDA driver does not survive a fork, and
the import may load one, so on GPUs ranks are spawned and import it in parallel with the front.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, SpawnProcess
from typing import Any, Protocol, TypedDict

from tasuki.config.schema import NodeConfig
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.process_start import preload
from tasuki.wire.errors import InternalError, TasukiError, from_reason

_POLL_S = 0.2
_INTERRUPTING = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)


class Closeable(Protocol):
    def close(self) -> None: ...


class RankProcesses:
    """One process per engine rank, with SGLang imported, waiting for its arguments."""

    def __init__(self) -> None:
        self.processes: list[SpawnProcess | ForkProcess] = []
        self._pipes: list[Connection] = []

    def start(self, config: NodeConfig, *, held: Sequence[Closeable] = ()) -> None:
        """held: open objects that a fork must not keep, such as the lock. On a CPU, call this before any thread starts."""
        is_fork = config.device == "cpu"
        if is_fork:
            preload("tasuki.rollout.sglang.scheduler")
        context = multiprocessing.get_context("fork") if is_fork else multiprocessing.get_context("spawn")
        # Nothing is ever sent: this end closes when the front dies, however it dies.
        end_of_front, self._lifeline = context.Pipe(duplex=False)
        for rank in range(config.num_engine_ranks):
            ours, theirs = context.Pipe()
            inherited = (self._lifeline, ours, *self._pipes, *held) if is_fork else ()
            with _uninterrupted() as mask:
                process = context.Process(
                    target=_run_rank, args=(theirs, end_of_front, config, rank, inherited, mask), name=f"engine-rank-{rank}"
                )
                process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        end_of_front.close()

    def launch(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Sends each rank the arguments of its scheduler, as `multiprocessing` would have done at start."""
        for rank, (pipe, rank_arguments) in enumerate(zip(self._pipes, arguments, strict=True)):
            try:
                pipe.send(rank_arguments)
            except OSError as error:
                raise self._lost(rank) from error

    def wait_for_reports(self) -> "list[RankReport]":
        """Returns when every rank is ready. Raises the error of a rank that fails to start; InternalError if it reported none.

        Ranks fail together when one of them does: its TasukiError says more than what the others say of it.
        """
        reports: dict[int, RankReport] = {}
        while len(reports) < len(self._pipes):
            for rank in set(range(len(self._pipes))) - set(reports):
                if self._pipes[rank].poll(_POLL_S):
                    reports[rank] = self._read_report(rank)
                elif not self.processes[rank].is_alive():
                    raise self._lost(rank)
            for rank, report in reports.items():
                if report["status"] != "ready":
                    raise _failed(rank, report)
        return [reports[rank] for rank in range(len(self._pipes))]

    def watch(self, on_death: Callable[[], None]) -> None:
        """Calls `on_death` in the running loop once a rank's process has ended, repeatedly until `unwatch`."""
        for process in self.processes:
            asyncio.get_running_loop().add_reader(process.sentinel, on_death)

    def unwatch(self) -> None:
        """Idempotent."""
        for process in self.processes:
            asyncio.get_running_loop().remove_reader(process.sentinel)

    def kill(self) -> None:
        """Kills all ranks and waits until they are gone, even after an interrupted start. Idempotent."""
        processes = multiprocessing.active_children()
        for process in processes:
            process.kill()
        for process in processes:
            process.join()

    def _read_report(self, rank: int) -> "RankReport":
        try:
            report: RankReport = self._pipes[rank].recv()
        except (EOFError, OSError) as error:
            raise self._lost(rank) from error
        if "reason" in report:
            raise _failed(rank, report)
        return report

    def _lost(self, rank: int) -> InternalError:
        process = self.processes[rank]
        process.join(timeout=10)
        return InternalError(
            f"engine rank {rank} ended with exit code {process.exitcode} while it started (-9: out of host memory?)"
        )


def _failed(rank: int, report: "RankReport") -> TasukiError:
    problem = f"engine rank {rank} could not start: {report['problem']}"
    return from_reason(report.get("reason", InternalError.reason), problem, {"rank": str(rank)})


@contextmanager
def _uninterrupted() -> Iterator[set[int]]:
    """Defers signals that end a start until the end of the block. Yields the previous mask.

    Their handler must know the rank that it has to kill, and must not run in it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTING)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run_rank(
    pipe: Connection,
    end_of_front: Connection,
    config: NodeConfig,
    rank: int,
    inherited: Sequence[Closeable],
    mask: Iterable[int],
) -> None:
    """inherited: of the front, through a fork. mask: of signals, before the start."""
    for each in inherited:
        each.close()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    # Ctrl-C reaches the whole group; the front ends its ranks in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    threading.Thread(target=_die_with_front, args=(end_of_front,), daemon=True).start()
    Heartbeat(config.state_dir, f"scheduler{rank}")  # lets the supervisor notice a stopped process; the scheduler has its own
    from tasuki.rollout.sglang.scheduler import run_scheduler

    run_scheduler(*pipe.recv(), pipe, config=config, rank=rank)


def _die_with_front(end_of_front: Connection) -> None:
    end_of_front.poll(None)
    os._exit(1)


class RankReport(TypedDict, total=False):
    """With status "ready" what the rank holds, otherwise the problem. reason: of a TasukiError.

    plan_problem: why the rank could not record its copy plan ahead of the first sync; empty if it did.
    """

    status: str
    reason: str
    problem: str
    max_total_num_tokens: int
    max_req_input_len: int
    max_running_requests: int
    weight_bytes: int
    kv_cache_bytes: int
    start_seconds: dict[str, float]
    plan_problem: str


@contextmanager
def reporting(pipe_writer: Connection) -> Iterator[None]:
    """Reports to the front why the rank could not start."""
    try:
        yield
    except TasukiError as error:
        pipe_writer.send(RankReport(status="failed", reason=error.reason, problem=error.message))
        raise
    except Exception as error:
        pipe_writer.send(RankReport(status="failed", problem=f"{type(error).__name__}: {error}"))
        raise
