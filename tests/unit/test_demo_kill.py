"""`make demo`: refusals of a process that does not exist, of a bad seed, and of a folder that is not a demo's; Ctrl-C."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from client.examples.demo.run import CONFIG, check_ranks, failpoint_of, remove_earlier
from tasuki.config.load import load_config
from tasuki.wire.errors import PathExists


@pytest.mark.parametrize("process", ["trainer0", "trainer1", "scheduler0", "trainer", "rollout", "coordinator"])
def test_processes_of_the_node_may_be_killed(process: str) -> None:
    check_ranks(failpoint_of(f"{process}@SYNC"), load_config(CONFIG, overrides=["trainer.num_ranks=2"]))


def test_a_demo_that_failed_at_once_can_be_repeated_and_no_other_folder_is_removed(tmp_path: Path) -> None:
    broken, other = tmp_path / "broken", tmp_path / "other"
    for folder in (broken, other):
        folder.mkdir()
        shutil.copy(CONFIG, folder / "config.toml")
    (other / "config.toml").write_text("# mine")
    remove_earlier(broken)
    assert not broken.exists()
    with pytest.raises(PathExists, match="is not from a demo"):
        remove_earlier(other)
    assert (other / "config.toml").exists()
