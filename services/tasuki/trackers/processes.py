"""Trackers started by `tasuki train`: separate processes, which the run neither waits for nor listens to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasuki.config.paths import log_path
from tasuki.config.schema import TrackConfig, TrackerName

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
