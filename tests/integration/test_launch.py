"""The launcher with real processes: how ranks learn their place, and how they end together, spawned or forked."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT
from tests.integration.node_process import is_alive
from tests.limits import wait_for

LIMIT_S = 30.0
RANK = """
import json, os, pathlib, signal, sys, time
import shared_by_ranks
from tasuki.trainer.launch import read_launch
launch = read_launch(os.environ)
out, kinds = pathlib.Path(sys.argv[1]), sys.argv[2:]
kind = kinds[launch.rank]
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
place = launch.store_path.parent
facts = [os.getpid(), launch.rank, launch.local_rank, launch.num_ranks, str(launch.store_path), oct(place.stat().st_mode)]
facts.append(shared_by_ranks.IMPORTED_BY)
(out / f"{launch.rank}.part").write_text(json.dumps(facts))
(out / f"{launch.rank}.part").rename(out / f"{launch.rank}.json")
if kind == "fails":
    while len(list(out.glob("*.json"))) < launch.num_ranks:
        time.sleep(0.01)
    sys.exit(7)
if kind == "raises":
    raise RuntimeError("torn")
if kind != "ends":
    time.sleep(600)
"""
SHARED = """
import os, pathlib, time
IMPORTED_BY = os.getpid()
if (slow := pathlib.Path(__file__).with_name("slow")).exists():
    slow.rename(slow.with_name("importing"))
    time.sleep(600)
"""


@pytest.fixture(params=["spawned", "forked"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


_launchers: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def no_launcher_outlives_its_test() -> Iterator[None]:
    yield
    while _launchers:
        with _launchers.pop() as launcher:
            launcher.terminate()


def launch_ranks(folder: Path, how: str, *kinds: str) -> subprocess.Popen[bytes]:
    (folder / "rank_of_test.py").write_text(RANK)
    (folder / "shared_by_ranks.py").write_text(SHARED)
    preload = ["--preload", "shared_by_ranks"] if how == "forked" else []
    launch = [sys.executable, "-m", "tasuki.trainer.launch", "--num-ranks", str(len(kinds)), *preload, "--"]
    path = os.pathsep.join([str(folder), ENVIRONMENT["PYTHONPATH"]])
    launcher = subprocess.Popen(
        [*launch, "-m", "rank_of_test", str(folder), *kinds],
        env=ENVIRONMENT | {"TMPDIR": str(folder), "PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )
    _launchers.append(launcher)
    return launcher


def facts_of(folder: Path, num_ranks: int) -> list[list[object]]:
    """Returns the facts of each rank, once all have written them."""
    files = [folder / f"{rank}.json" for rank in range(num_ranks)]
    wait_for(lambda: all(file.exists() for file in files), LIMIT_S)
    return [json.loads(file.read_text()) for file in files]


def pids_of(folder: Path, num_ranks: int) -> list[int]:
    return [int(str(facts[0])) for facts in facts_of(folder, num_ranks)]


def test_each_rank_knows_its_place_and_a_private_store_that_goes_with_the_launch(tmp_path: Path, how: str) -> None:
    stores = []
    for _ in range(2):
        assert launch_ranks(tmp_path, how, "ends", "ends").wait(LIMIT_S) == 0
        facts = facts_of(tmp_path, 2)
        assert [fact[1:4] for fact in facts] == [[0, 0, 2], [1, 1, 2]]
        assert facts[0][4:6] == facts[1][4:6]
        assert facts[0][5] == "0o40700"
        assert len({fact[0] for fact in facts}) == 2
        stores.append(Path(str(facts[0][4])))
    assert stores[0] != stores[1]
    assert not any(store.parent.exists() for store in stores)


def test_an_order_to_stop_reaches_every_rank(tmp_path: Path, how: str) -> None:
    launcher = launch_ranks(tmp_path, how, "waits", "waits")
    pids = pids_of(tmp_path, 2)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(("kind", "exit_code"), [("fails", 7), ("raises", 1), ("killed", 128 + signal.SIGKILL)])
def test_a_rank_that_fails_ends_the_launch_with_its_exit_code(tmp_path: Path, how: str, kind: str, exit_code: int) -> None:
    launcher = launch_ranks(tmp_path, how, "waits", kind, "waits")
    pids = pids_of(tmp_path, 3)
    if kind == "killed":
        os.kill(pids[1], signal.SIGKILL)
    assert launcher.wait(LIMIT_S) == exit_code
    assert not any(map(is_alive, pids))


def test_a_rank_that_does_not_listen_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    launcher = launch_ranks(tmp_path, "forked", "deaf", "waits")
    pids = pids_of(tmp_path, 2)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert is_alive(pids[0])
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not is_alive(pids[0])


def test_forked_ranks_share_one_import_and_keep_nothing_of_the_launcher_but_its_pidfd(tmp_path: Path) -> None:
    launcher = launch_ranks(tmp_path, "forked", "waits", "waits")
    facts = facts_of(tmp_path, 2)
    assert [fact[6] for fact in facts] == [launcher.pid, launcher.pid]
    for pid in (int(str(fact[0])) for fact in facts):
        assert len([fd for fd in Path(f"/proc/{pid}/fd").iterdir() if int(fd.name) > 2]) == 1
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        taken = {line.split()[0]: int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigCgt"))}
        assert taken["SigBlk:"] == 0
        assert not taken["SigCgt:"] & ((1 << signal.SIGTERM - 1) | (1 << signal.SIGHUP - 1))
    launcher.terminate()
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGTERM
