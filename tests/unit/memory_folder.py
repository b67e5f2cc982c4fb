"""A folder whose writes need not wait for a disk."""

import shutil
from pathlib import Path

_LEAST_BYTES = 1 << 30


def memory_folder() -> str | None:
    """Returns /dev/shm; None, the default for temporary files, if it is small, as in containers by default."""
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() and shutil.disk_usage(shm).free >= _LEAST_BYTES else None


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of single characters."""
    shutil.copy(Path(__file__).parents[1] / "recorded_run" / "model" / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text("{}")
