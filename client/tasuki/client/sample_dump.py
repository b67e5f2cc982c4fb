"""Some completions of each step, written for people to read: `samples/step-000012.jsonl`, by a thread beside the loop."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tasuki.client.shown_samples import ShownSamples

_MAX_WAITING = 16
"""Steps that wait for a slow disk; further ones are dropped."""
_CLOSE_TIMEOUT_S = 5.0
_BLOCK_BYTES = 512
"""Unit of st_blocks."""


class SampleDump:
    """Writes each step's samples aside and renames the file; removes the oldest files beyond `max_bytes`. Use it in a `with` block.

    A disk that is full, slow or read-only costs samples and never the run: the first error is told, the loop waits for nothing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        groups_per_step: int = 4,
        max_bytes: int = 256_000_000,
        seed: int = 0,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """groups_per_step: chosen by `seed` and step. max_bytes: of all files, as the disk counts them.

        tell: gets a line, once; stderr by default.
        """
        self.folder = folder
        self._groups_per_step, self._max_bytes, self._seed = groups_per_step, max_bytes, seed
        self._tell, self._has_told = tell, False
        self._sizes: dict[Path, int] = {}
        self._waiting: queue.Queue[ShownSamples | None] = queue.Queue(_MAX_WAITING)
        # A disk that hangs must not keep the process.
        self._writer = threading.Thread(target=self._run, name="tasuki-samples", daemon=True)
        self._writer.start()

    def __enter__(self) -> SampleDump:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def begin(self, step: int) -> ShownSamples:
        """A step without samples yet, for `write`."""
        return ShownSamples(step, num_groups=self._groups_per_step, seed=self._seed)

    def write(self, shown: ShownSamples) -> None:
        """Hands the step to the writer; returns at once."""
        try:
            self._waiting.put_nowait(shown)
        except queue.Full:
            self._say(f"the disk of {self.folder} is too slow for all samples; some steps have none")

    def close(self) -> None:
        """Waits until what was handed over is written, at most 5 s."""
        try:
            self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._writer.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (shown := self._waiting.get()) is not None:
            try:
                self._write(shown)
            except OSError as error:
                self._say(f"samples are not written: {error}; the run goes on without them")

    def _write(self, shown: ShownSamples) -> None:
        lines = shown.lines(max_bytes=self._max_bytes)
        if not lines:
            return
        if not self._sizes:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sizes = {path: _size(path) for path in self.folder.glob("step-*.jsonl")}
        path = self.folder / f"step-{shown.step:06d}.jsonl"
        aside = path.with_name(f".{path.name}.partial")
        try:
            aside.write_bytes(b"".join(lines))
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        self._sizes[path] = _size(path)
        self._rotate(newest=path)

    def _rotate(self, *, newest: Path) -> None:
        total = sum(self._sizes.values())
        for path in sorted(self._sizes.keys() - {newest}):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= self._sizes.pop(path)

    def _say(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            (sys.stderr.write if self._tell is None else self._tell)(f"tasuki: {text}\n")


def _size(path: Path) -> int:
    return path.stat().st_blocks * _BLOCK_BYTES
