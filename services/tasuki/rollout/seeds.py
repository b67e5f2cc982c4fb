"""Seeds of samples: which calls repeat each other's samples, and which never do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tasuki.wire.errors import NO_ROOM, DiskFull

_SEED_BITS = 62


def sample_seed(seed: int | str, *, prompt: int, sample: int) -> int:
    """The seed of one sample: the first 62 bits of the SHA-256 of "SEED/PROMPT/SAMPLE"."""
    digest = hashlib.sha256(f"{seed}/{prompt}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


class CallNumbers:
    """Numbers the calls that ask for the same at one policy version, so that each of them samples by other seeds.

    A call that is repeated under its id keeps its number, also in a service that was killed and started again: the numbers are in a
    file. It is not synced, since it needs to outlive a process and no more.
    """

    def __init__(self, path: Path, *, instance_id: str) -> None:
        """instance_id: start of the node. What another one left at `path` does not count."""
        self._path, self._instance_id = path, instance_id
        self._version: int | None = None
        self._calls: dict[str, list[str]] = {}
        """Ids of the calls of each question, in their order."""
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            self._read(line)

    def begin_version(self, version: int | None) -> None:
        """Forgets the calls of any other version."""
        if version != self._version:
            self._version = version
            self._calls.clear()
            self.remove()

    def number(self, question: str, *, call_id: str) -> int:
        """Place of the call among those with the same question. Raises DiskFull, and OSError."""
        calls = self._calls.setdefault(question, [])
        if call_id not in calls:
            self._write([self._instance_id, self._version, question, call_id])
            calls.append(call_id)
        return calls.index(call_id)

    def remove(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)

    def _read(self, line: str) -> None:
        try:
            instance_id, version, question, call_id = json.loads(line)
        except ValueError:
            return  # cut off when the service was killed, before the call began
        if instance_id == self._instance_id:
            if version != self._version:
                self._version, self._calls = version, {}
            self._calls.setdefault(question, []).append(call_id)

    def _write(self, entry: list[str | int | None]) -> None:
        try:
            with self._path.open("a") as file:
                # Begins with the end of a line: the one before may have been cut off.
                file.write(f"\n{json.dumps(entry)}")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise DiskFull(
                f"{self._path} cannot be written: {error.strerror}; make room, and repeat", path=self._path
            ) from error
