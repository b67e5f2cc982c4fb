"""Small files that are there whole or not at all, also after the machine has crashed."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Writes aside, fsyncs and renames; what was at `path` is there until then."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)  # on a full disk it would be in the way of everything else
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
