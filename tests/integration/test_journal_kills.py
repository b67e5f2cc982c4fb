"""A process that writes the journal is killed at arbitrary moments: no acknowledged entry is lost.

`make test` kills it 100 times, `make chaos` 500 times.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tasuki.coordinator.history import History, read_history
from tasuki.coordinator.replay import audit
from tests.conftest import ENVIRONMENT
from tests.extent import IS_WHOLE
from tests.unit.memory_folder import memory_folder

WRITER = Path(__file__).with_name("journal_writer.py")
NUM_KILLS, BATCH, SEED = 500 if IS_WHOLE else 100, 50, 5


def test_kills_lose_nothing_that_was_acknowledged() -> None:
    # What a killed process has written is in the system's cache; only a power loss needs a real disk.
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        journal = Path(folder) / "journal.sqlite"
        lives: list[list[str]] = []
        for seed in range(SEED, SEED + NUM_KILLS // BATCH):
            lives += kill_writers(journal, seed)
            history = read_history(journal)
            violation = audit(history).violation
            assert violation is None, f"after {len(lives)} kills: {violation}"
        acknowledged = [line for life in lives for line in life]
        lines = kept(history)
        assert [line for line in acknowledged if line not in lines] == []
    assert len(lives) == NUM_KILLS
    assert len(acknowledged) > 10 * NUM_KILLS
    last_words = {life[-1].split()[0] for life in lives if life}
    # Kills right after the start of an epoch are rare: of a hundred perhaps none.
    places = {"changeover", "intent", "result", "ending", *(["epoch"] if IS_WHOLE else [])}
    assert places <= last_words, "somewhere no writer was killed"


def kill_writers(journal: Path, seed: int) -> list[list[str]]:
    argv = [sys.executable, str(WRITER), str(journal), str(BATCH), str(seed)]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def kept(history: History) -> set[str]:
    """Returns every line that a writer may have printed about the journal's content."""
    lines = {f"epoch {epoch}" for epoch in history.epochs}
    lines |= {f"changeover {one.id}" for one in history.changeovers}
    lines |= {f"ending {one.id}" for one in history.changeovers if one.status}
    lines |= {f"intent {one.id}" for one in history.stages}
    return lines | {f"result {one.id}" for one in history.stages if one.status}
