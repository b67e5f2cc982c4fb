"""A node's processes, found by their pulse files, whose names hold role and pid."""

import re
from pathlib import Path

from tasuki.config.paths import pulse_dir


def pids(state_dir: Path, process: str) -> list[int]:
    """Returns the pids of living processes with that name, such as "trainer0"; a killed process leaves its pulse file behind."""
    found = [int(path.name.rpartition("-")[2]) for path in pulse_dir(state_dir).glob(f"{process}-*")]
    return [pid for pid in found if Path(f"/proc/{pid}").exists()]


def engine_rank_pids(state_dir: Path) -> list[int]:
    """Returns the pids of living engine ranks, by rank. Process titles depend on the size of the environment, so they cannot tell."""
    ranks = {match[1] for path in pulse_dir(state_dir).iterdir() if (match := re.fullmatch(r"scheduler(\d+)-\d+", path.name))}
    return [pid for rank in sorted(ranks, key=int) for pid in pids(state_dir, f"scheduler{rank}")]
