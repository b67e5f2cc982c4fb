"""A run's progress outside its process: `progress.json` of the output folder, and the line that shows it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tasuki.client.durable import open_private
from tasuki.client.progress import Progress, ProgressRecord
from tasuki.config.paths import training_output_path
from tasuki.wire.regular_file import read_path, read_regular

_EVERY_S = 1.0
_MAX_BYTES = 100_000
_MINUTE_S = 60
_STALE_S = 15.0
_Record = TypeAdapter(ProgressRecord)


def progress_path(output_dir: Path) -> Path:
    return output_dir / "progress.json"


@contextmanager
def written_progress(progress: Progress, output_dir: Path, *, show: Callable[[ProgressRecord], None]) -> Iterator[None]:
    """Replaces progress.json every second on another thread, and shows each record; removes the file as the block ends.

    A full disk leaves the file out: a run must not end for it.
    """
    path, is_over = progress_path(output_dir), threading.Event()

    def tick() -> None:
        while True:
            record = progress.record()
            with suppress(OSError):
                _replace(path, json.dumps(asdict(record)) + "\n")
            with suppress(OSError):  # nobody reads
                show(record)
            if is_over.wait(_EVERY_S):
                return

    thread = threading.Thread(target=tick, name="tasuki-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        with suppress(OSError):
            path.unlink(missing_ok=True)


def node_progress(state_dir: Path) -> ProgressRecord | None:
    """Progress of the run on a node; None without one."""
    try:
        return read_progress(read_path(training_output_path(state_dir)))
    except OSError:
        return None


def read_progress(output_dir: Path) -> ProgressRecord | None:
    """Returns None while no command trains the run, or if the file cannot be read."""
    try:
        return _Record.validate_json(read_regular(progress_path(output_dir), max_bytes=_MAX_BYTES))
    except (OSError, ValidationError):
        return None


def progress_line(record: ProgressRecord) -> str:
    """Formats a record: "step 3/40  generate 37 of 256, 812 tokens/s  12 s  about 8 min left", or that its command has ended."""
    if 0 < record.updated_at < (now := time.time()) - _STALE_S:
        ago = duration(now - record.updated_at)
        return f"step {record.step}/{record.steps}  stopped or killed {ago} ago; continue it with: tasuki train CONFIG --resume"
    counts = f" {record.done} of {record.total}" if record.total > 1 else ""
    speed = "" if record.tokens_per_second is None else f", {record.tokens_per_second:,.0f} tokens/s"
    parts = [f"step {record.step}/{record.steps}", f"{record.activity}{counts}{speed}", duration(record.activity_s)]
    if record.eta_s is not None:
        parts.append(f"about {duration(record.eta_s)} left{' without this wait' if record.waits_for else ''}")
    if record.waits_for:
        parts.append(record.waits_for)
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Formats seconds in the two largest units: "47 s", "12 min", "3 h 05 min"."""
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    minutes = round(seconds / _MINUTE_S)
    return f"{minutes} min" if minutes < 2 * _MINUTE_S else f"{minutes // 60} h {minutes % 60:02} min"


def _replace(path: Path, text: str) -> None:
    """Replaces the file at once; without fsync, since it is worth nothing after a crash."""
    aside = path.with_name(f".{path.name}.partial")
    aside.unlink(missing_ok=True)
    with open_private(aside, "w") as file:
        file.write(text)
    aside.replace(path)
