"""Lines of a file that another process may be appending to, read in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_BYTES = 16 << 20


@dataclass(slots=True)
class LineReader:
    """Reads on at `offset`."""

    offset: int = 0
    _is_in_long_line: bool = False

    def lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields the lines behind `offset`, without a last one that is still being written.

        A line above 16 MiB is an empty line, followed by `b""` for each of its other parts.
        """
        file.seek(self.offset)
        while line := file.readline(MAX_LINE_BYTES):
            is_end, was_long = line.endswith(b"\n"), self._is_in_long_line
            if not is_end and not was_long and len(line) < MAX_LINE_BYTES:
                return
            self.offset += len(line)
            self._is_in_long_line = not is_end
            yield b"" if was_long else line if is_end else b"\n"
