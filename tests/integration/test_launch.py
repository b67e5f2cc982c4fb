"""The launcher with real processes: how ranks are told who they are, and how they end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasuki.trainer.launch import read_launch
from tasuki.wire.errors import InvalidArgument
from tests.conftest import ENVIRONMENT
from tests.integration.trainer_process import is_alive

LIMIT_S = 30.0
RANK = """
import json, os, pathlib, signal, sys, time
from tasuki.trainer.launch import read_launch
launch = read_launch(os.environ)
out, kinds = pathlib.Path(sys.argv[1]), sys.argv[2:]
kind = kinds[launch.rank]
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
place = launch.store_path.parent
facts = [os.getpid(), launch.rank, launch.local_rank, launch.num_ranks, str(launch.store_path), oct(place.stat().st_mode)]
(out / f"{launch.rank}.part").write_text(json.dumps(facts))
(out / f"{launch.rank}.part").rename(out / f"{launch.rank}.json")
if kind == "fails":
    while len(list(out.glob("*.json"))) < launch.num_ranks:
        time.sleep(0.01)
    sys.exit(7)
if kind != "ends":
    time.sleep(600)
"""


def launch_ranks(folder: Path, *kinds: str) -> subprocess.Popen[bytes]:
    argv = [
        sys.executable,
        "-m",
        "tasuki.trainer.launch",
        "--num-ranks",
        str(len(kinds)),
        "--",
        "-c",
        RANK,
        str(folder),
        *kinds,
    ]
    return subprocess.Popen(argv, env=ENVIRONMENT | {"TMPDIR": str(folder)})


def facts_of(folder: Path, num_ranks: int) -> list[list[object]]:
    """What each rank wrote, once all have."""
    files = [folder / f"{rank}.json" for rank in range(num_ranks)]
    deadline = time.monotonic() + LIMIT_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "a rank did not start"
        time.sleep(0.02)
    return [json.loads(file.read_text()) for file in files]


def pids_of(folder: Path, num_ranks: int) -> list[int]:
    return [int(str(facts[0])) for facts in facts_of(folder, num_ranks)]


def test_each_rank_knows_its_place_and_a_private_store_that_goes_with_the_launch(tmp_path: Path) -> None:
    stores = []
    for _ in range(2):
        assert launch_ranks(tmp_path, "ends", "ends").wait(LIMIT_S) == 0
        facts = facts_of(tmp_path, 2)
        assert [fact[1:4] for fact in facts] == [[0, 0, 2], [1, 1, 2]]
        assert facts[0][4:] == facts[1][4:]
        assert facts[0][5] == "0o40700"
        stores.append(Path(str(facts[0][4])))
    assert stores[0] != stores[1]
    assert not any(store.parent.exists() for store in stores)


def test_an_order_to_stop_reaches_every_rank(tmp_path: Path) -> None:
    launcher = launch_ranks(tmp_path, "waits", "waits")
    pids = pids_of(tmp_path, 2)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(("kind", "exit_code"), [("fails", 7), ("killed", 128 + signal.SIGKILL)])
def test_a_rank_that_fails_ends_the_launch_with_its_exit_code(tmp_path: Path, kind: str, exit_code: int) -> None:
    launcher = launch_ranks(tmp_path, "waits", kind, "waits")
    pids = pids_of(tmp_path, 3)
    if kind == "killed":
        os.kill(pids[1], signal.SIGKILL)
    assert launcher.wait(LIMIT_S) == exit_code
    assert not any(map(is_alive, pids))


def test_a_rank_that_does_not_listen_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    launcher = launch_ranks(tmp_path, "deaf", "waits")
    pids = pids_of(tmp_path, 2)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert is_alive(pids[0])
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not is_alive(pids[0])


def test_a_rank_that_nobody_launched_says_how_to_start_it() -> None:
    with pytest.raises(InvalidArgument, match=r"RANK is not set; start the trainer by: python -m tasuki\.trainer\.launch"):
        read_launch({})
