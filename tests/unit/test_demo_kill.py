"""`make demo`: refusals of a process that does not exist, of a bad seed, and of a folder that is not a demo's; Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from client.examples.demo.run import CONFIG, check_ranks, failpoint_of, remove_earlier
from tasuki.config.load import load_config
from tasuki.wire.errors import InvalidArgument, PathExists
from tests.conftest import ENVIRONMENT, ROOT

RUN = [sys.executable, ROOT / "client" / "examples" / "demo" / "run.py"]


@pytest.mark.parametrize("process", ["trainer0", "trainer1", "scheduler0", "trainer", "rollout", "coordinator"])
def test_processes_of_the_node_may_be_killed(process: str) -> None:
    check_ranks(failpoint_of(f"{process}@SYNC"), load_config(CONFIG, overrides=["trainer.num_ranks=2"]))


@pytest.mark.parametrize(
    ("process", "last"), [("trainer2", "trainer1"), ("trainer7", "trainer1"), ("scheduler1", "scheduler0")]
)
def test_a_rank_that_the_node_does_not_have_is_refused(process: str, last: str) -> None:
    config = load_config(CONFIG, overrides=["trainer.num_ranks=2"])
    with pytest.raises(InvalidArgument, match=f"--kill: there is no {process}; the last one of this node is {last}"):
        check_ranks(failpoint_of(f"{process}@SYNC"), config)


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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kill", "trainer7@SYNC"], "--kill: there is no trainer7; the last one of this node is trainer1"),
        (["--seed", "-1"], "seed: Input should be greater than or equal to 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_the_task_is_made(tmp_path: Path, arguments: list[str], told: str) -> None:
    command = [*RUN, "--output", tmp_path / "demo", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert not (tmp_path / "demo").exists()


def test_an_interrupt_while_the_task_is_made_is_one_line(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    command = [*RUN, "--output", tmp_path / "demo"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, process_group=0) as demo:
        assert demo.stdout is not None
        assert "making the task" in demo.stdout.readline()
        time.sleep(0.5)  # while the child imports
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
        _, told = demo.communicate(timeout=60)
    assert (demo.returncode, told) == (130, "tasuki: interrupted\n")
