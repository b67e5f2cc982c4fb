"""Rotation of files of earlier runs: a fixed number is kept, the newest under the shortest name."""

from __future__ import annotations

from pathlib import Path

from tasuki.node.rotation import rotate, rotated_paths


def test_the_last_ones_are_kept_and_the_oldest_goes(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    for number in range(5):
        rotate(log, keep=3)
        log.write_text(str(number))
    assert [path.name for path in rotated_paths(log, keep=3)] == ["trainer.log.old", "trainer.log.old.1", "trainer.log.old.2"]
    assert [path.read_text() for path in (log, *rotated_paths(log, keep=3))] == ["4", "3", "2", "1"]
    assert len(list(tmp_path.iterdir())) == 4
