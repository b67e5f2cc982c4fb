"""`tasuki track`: sends a run's metrics to a tracker, during the run or afterwards.

`tasuki train` starts it with a pipe, in a process of its own, which the run neither waits for nor listens to.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tasuki.client.durable import named_if_full, write_durably
from tasuki.config.paths import log_path
from tasuki.config.schema import TrackConfig, TrackerName
from tasuki.coordinator.metrics_tail import METRICS, MetricsTail
from tasuki.runs.earlier_run import read_head
from tasuki.trackers.adapters import TrackedRun, Tracker, check_installed, import_library, open_tracker
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import read_regular

TRACK = "track"
"""Folder of the trackers' files in a run's folder."""
_POLL_S = 2.0
_SAVE_EVERY_S = 10.0
"""A tracker that is killed receives the steps of this interval again."""
_MAX_BYTES = 4096
_NICE = 10
"""Lower priority than the services, which may need the processors."""
LEFT_ALONE_S = 60.0
"""Time limit for a tracker to finish after its run has ended."""


@dataclass(slots=True)
class _Progress:
    """Steps already sent to a tracker, in a file next to the tracker's own."""

    path: Path
    last_step: int = -1
    _saved_step: int = -1
    _saved_at: float = 0.0

    @classmethod
    def of(cls, output_dir: Path, name: TrackerName) -> "_Progress":
        path = output_dir / TRACK / f"{name}.json"
        try:
            step = int(json.loads(read_regular(path, max_bytes=_MAX_BYTES))["last_step"])
            return cls(path, step, step)
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise InvalidArgument("run", f"{path} is damaged: {error}; remove it to send all steps again") from error

    def advance(self, step: int) -> None:
        """Saved occasionally: each write to disk would delay the node's journal."""
        self.last_step = step
        if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        if self._saved_step != self.last_step:
            write_durably(self.path, json.dumps({"last_step": self.last_step}) + "\n")
            self._saved_step, self._saved_at = self.last_step, time.monotonic()


def run(output_dir: Path, *, to: TrackerName, track: TrackConfig, follows: bool = False, pipe_fd: int | None = None) -> int:
    """Sends the steps that the tracker lacks. Raises PathNotFound if there is no run, InvalidArgument for one without steps,
    DiskFull, and NotInstalled without the tracker's library.

    follows: continue until the run's summary exists. pipe_fd: continue until its writer has ended, then at most a minute.
    """
    check_installed(to, key="to")
    if pipe_fd is None and not (output_dir / METRICS).is_file():
        raise PathNotFound(f"{output_dir} has no {METRICS}: give the output folder of a run", path=output_dir)
    progress = _Progress.of(output_dir, to)
    (output_dir / TRACK).mkdir(mode=0o700, parents=True, exist_ok=True)
    if pipe_fd is not None and not _await_run(output_dir, to, pipe_fd=pipe_fd):
        return 0
    tail, num_sent = MetricsTail(output_dir), 0
    is_once = pipe_fd is None and not follows
    if is_once and not any(figures.step > progress.last_step for figures in MetricsTail(output_dir).read()):
        if progress.last_step < 0:
            raise InvalidArgument("run", f"{output_dir / METRICS} has no steps")
        sys.stderr.write(f"{to} has every step, up to step {progress.last_step}\n")
        return 0
    with named_if_full(output_dir / TRACK / to), _opened(to, _tracked(output_dir, to, track), progress) as tracker:
        while True:
            is_over = _is_over(output_dir, follows=follows, pipe_fd=pipe_fd)
            num_sent += _send(tail, tracker, progress)
            if is_over:
                break
            if pipe_fd is None:
                time.sleep(_POLL_S)
    sys.stderr.write(f"{num_sent} steps to {to}, up to step {progress.last_step}: {output_dir / TRACK / to}\n")
    return 0


@contextmanager
def _opened(to: TrackerName, tracked: TrackedRun, progress: _Progress) -> Iterator[Tracker]:
    tracker = open_tracker(to, tracked)
    try:
        yield tracker
    finally:
        try:
            progress.save()
        finally:
            tracker.close()


def _send(tail: MetricsTail, tracker: Tracker, progress: _Progress) -> int:
    num_sent = 0
    for figures in tail.read():
        # A resumed run repeats some steps with equal results.
        if figures.step > progress.last_step:
            tracker.log(figures.step, figures.values)
            progress.advance(figures.step)
            num_sent += 1
    return num_sent


def _await_run(output_dir: Path, to: TrackerName, *, pipe_fd: int) -> bool:
    """Prepares while the node starts. Returns False if no run began."""
    os.nice(_NICE)
    import_library(to)
    while read_head(output_dir) is None:
        if _is_over(output_dir, follows=True, pipe_fd=pipe_fd):
            return False
    return True


def _is_over(output_dir: Path, *, follows: bool, pipe_fd: int | None) -> bool:
    """Whether the file is complete. Waits a moment for the pipe to close."""
    if pipe_fd is None:
        return not follows or (output_dir / "summary.json").exists()
    readable, _, _ = select.select([pipe_fd], [], [], _POLL_S)
    if readable:
        # A tracker that hangs must not outlive its run forever.
        limit = threading.Timer(LEFT_ALONE_S, os._exit, args=(1,))
        limit.daemon = True
        limit.start()
    return bool(readable)


def _tracked(output_dir: Path, name: TrackerName, track: TrackConfig) -> TrackedRun:
    head = read_head(output_dir)
    run_name = track.name or output_dir.resolve().name
    return TrackedRun(
        id=run_name if head is None else head.id,
        folder=output_dir / TRACK / name,
        project=track.project,
        name=run_name,
        settings={} if head is None else head.recipe,
    )


_WAIT_S = 10.0


@contextmanager
def tracked(output_dir: Path, track: TrackConfig) -> Iterator[None]:
    """Starts every tracker of `track` for the block, and afterwards gives them 10 s to finish.

    Failures are reported, not raised. A tracker ends when this process is killed.
    """
    read_fd, write_fd = os.pipe()
    try:
        trackers: dict[TrackerName, subprocess.Popen[bytes] | None] = {
            name: _start(output_dir, name, track, read_fd=read_fd) for name in track.to
        }
    finally:
        os.close(read_fd)
    try:
        yield
    finally:
        os.close(write_fd)
        deadline = time.monotonic() + _WAIT_S
        for name, process in trackers.items():
            if process is not None:
                _finish(output_dir, name, process, deadline=deadline)


def _start(output_dir: Path, name: TrackerName, track: TrackConfig, *, read_fd: int) -> subprocess.Popen[bytes] | None:
    argv = [sys.executable, "-P", "-m", "tasuki.cli", "track", str(output_dir), "--to", name, "--project", track.project]
    argv += ["--name", track.name] if track.name is not None else []
    log = log_path(output_dir, f"track-{name}")
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log.touch(mode=0o600)
        with log.open("ab") as output:
            return subprocess.Popen(
                [*argv, "--pipe-fd", str(read_fd)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(read_fd,),
                umask=0o077,
                start_new_session=True,  # Ctrl-C only interrupts the run
            )
    except OSError as error:
        _tell(output_dir, name, f"could not be started: {error}")
        return None


def _finish(output_dir: Path, name: TrackerName, process: subprocess.Popen[bytes], *, deadline: float) -> None:
    try:
        if process.wait(max(0.0, deadline - time.monotonic())) != 0:
            _tell(output_dir, name, f"failed, see {log_path(output_dir, f'track-{name}')}")
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        _tell(output_dir, name, f"did not end within {_WAIT_S:.0f} s")


def _tell(output_dir: Path, name: TrackerName, problem: str) -> None:
    sys.stderr.write(f"tasuki: tracker {name} {problem}; send the missing steps with: tasuki track {output_dir} --to {name}\n")
