"""Writes completions of each step for inspection: `samples/step-000012.jsonl`, from a background thread."""

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tasuki.client.durable import open_private
from tasuki.client.shown_samples import ShownSamples

_MAX_WAITING = 16
"""Steps queued for a slow disk; further ones are dropped."""
_CLOSE_TIMEOUT_S = 5.0
_AHEAD_S = 1.0
"""Longest wait for a step that is written before it is recorded."""
_PAUSE_S = 0.1
"""Before a step is converted: the loop then waits for the engine, and does not wait for the interpreter's lock instead."""
_BLOCK_BYTES = 512
"""Unit of st_blocks."""


class SampleDump:
    """Writes each step's samples atomically, and removes the oldest files beyond `max_bytes`. Use it in a `with` block.

    A full, slow or read-only disk costs samples but never the run: the first error is reported, and the loop never waits.
    """

    def __init__(
        self,
        folder: Path,
        *,
        groups_per_step: int = 4,
        num_texts: int = 32,
        max_bytes: int = 256_000_000,
        seed: int = 0,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """groups_per_step, num_texts: see ShownSamples. max_bytes: of all files, by disk usage.

        tell: receives a line at the first error; stderr by default.
        """
        self.folder = folder
        self._groups_per_step, self._num_texts, self._max_bytes, self._seed = groups_per_step, num_texts, max_bytes, seed
        self._tell, self._has_told = tell, False
        self._sizes: dict[Path, int] = {}
        """Bytes of each file, least recently written first."""
        self._total = 0
        self._waiting: queue.Queue[tuple[ShownSamples, threading.Event | None] | None] = queue.Queue(_MAX_WAITING)
        self._closing = threading.Event()
        # A hanging disk must not keep the process alive.
        self._writer = threading.Thread(target=self._run, name="tasuki-samples", daemon=True)
        self._writer.start()

    def __enter__(self) -> "SampleDump":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def begin(self, step: int) -> ShownSamples:
        """An empty step, to fill and pass to `write`."""
        return ShownSamples(step, num_groups=self._groups_per_step, num_texts=self._num_texts, seed=self._seed)

    def write(self, shown: ShownSamples) -> None:
        """Queues the step for writing; returns at once."""
        self._queue(shown, None)

    def write_ahead(self, shown: ShownSamples) -> None:
        """Writes what is known of a step before it is recorded: if the client is killed afterwards, its samples are not lost."""
        written = threading.Event()
        self._queue(shown, written)
        written.wait(_AHEAD_S)

    def _queue(self, shown: ShownSamples, written: threading.Event | None) -> None:
        try:
            self._waiting.put_nowait((shown, written))
        except queue.Full:
            self._say(f"the disk of {self.folder} is too slow for all samples; some steps are skipped")

    def close(self) -> None:
        """Waits until queued steps are written, at most 5 s."""
        self._closing.set()
        try:
            self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._writer.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (asked := self._waiting.get()) is not None:
            shown, written = asked
            if written is None and self._waiting.empty():
                self._closing.wait(_PAUSE_S)
            try:
                self._write(shown)
            except OSError as error:
                self._say(f"samples cannot be written: {error}; the run continues without them")
            if written is not None:
                written.set()

    def _write(self, shown: ShownSamples) -> None:
        lines = shown.lines(max_bytes=self._max_bytes)
        if not lines:
            return
        if not self._sizes:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts and completions are the user's alone
            paths = sorted(self.folder.glob("step-*.jsonl"), key=lambda path: (len(path.name), path.name))
            self._sizes = {path: _size(path) for path in paths}
            self._total = sum(self._sizes.values())
        path = self.folder / f"step-{shown.step:06d}.jsonl"
        aside = path.with_name(f".{path.name}.partial")
        try:
            with open_private(aside, "wb") as file:
                file.writelines(lines)
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        self._total -= self._sizes.pop(path, 0)
        self._sizes[path] = _size(path)
        self._total += self._sizes[path]
        self._rotate()

    def _rotate(self) -> None:
        while self._total > self._max_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            self._total -= self._sizes.pop(oldest)

    def _say(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            (sys.stderr.write if self._tell is None else self._tell)(f"tasuki: {text}\n")


def _size(path: Path) -> int:
    return path.stat().st_blocks * _BLOCK_BYTES
