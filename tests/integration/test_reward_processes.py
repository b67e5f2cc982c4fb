"""Processes that rewards start, in any way, end with their worker: at the limit, when the pool closes, and when the client is killed."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.client.rewards import RewardPool
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.process_tree import has_ended
from tests.conftest import ENVIRONMENT
from tests.limits import wait_for

REWARDS = """
import os, signal, subprocess, sys, threading, time

def note():
    with open(NOTES, "a") as notes:
        notes.write(f"{os.getpid()}\\n")

def stay():
    note()
    while True:
        time.sleep(60)

def forks():
    if not os.fork(): stay()

def daemonizes():
    if not os.fork():
        os.setsid()
        if not os.fork(): stay()
        os._exit(0)

def chains():
    for _ in range(3):
        if os.fork(): break
        os.setsid()
    else:
        stay()
    if os.getpid() != OWN: os._exit(0)

def runs():
    subprocess.Popen([sys.executable, "-c", f"NOTES = {NOTES!r}\\n" + SOURCE + "stay()"], env={}, start_new_session=True)

def returns_twice():
    os.fork()

def deafens():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)

def stops_child():
    if not os.fork():
        note()
        os.kill(os.getpid(), signal.SIGSTOP)

def closes(): os.closerange(3, 4096)
def closes_all(): os.closerange(0, 4096)
def opens(): globals().setdefault("files", []).extend(os.pipe() + os.pipe())
def hangs(): time.sleep(600)
def spins():
    while True: pass
def leaves(): os._exit(0)
def dies(): os.kill(os.getpid(), signal.SIGKILL)
def kills_group(): os.killpg(0, signal.SIGKILL)
def stops(): os.kill(os.getpid(), signal.SIGSTOP)
def stops_nest(): os.kill(os.getppid(), signal.SIGSTOP)
def kills_nest(): os.kill(os.getppid(), signal.SIGKILL)
def orphan_kills_nest():
    if not os.fork():
        middle = os.getpid()
        if os.fork(): os._exit(0)
        while os.getppid() == middle: time.sleep(0.01)
        kills_nest()
        stay()
def kills_both_nests():
    inner = os.getppid()
    with open(f"/proc/{inner}/stat") as stat:
        outer = int(stat.read().rpartition(")")[2].split()[1])
    daemonizes()
    if not os.fork():
        for nest in (outer, inner):
            os.kill(nest, signal.SIGKILL)
        stay()
def raises(): raise RuntimeError("x")

OWN = 0

def reward(completion):
    global OWN
    OWN = os.getpid()
    note()
    for name in completion.split():
        globals()[name]()
    return 1.0
"""
STARTS = ("forks", "daemonizes", "chains", "runs", "returns_twice", "deafens", "stops_child", "closes", "closes_all", "opens")
ENDS = ("", "hangs", "spins", "leaves", "dies", "kills_group", "stops", "raises", "stops_nest hangs")
KILLS = (
    "daemonizes deafens kills_nest hangs",
    "forks orphan_kills_nest hangs",
    "kills_both_nests hangs",
    "chains kills_both_nests",
    "deafens runs kills_both_nests hangs",
    "runs closes_all kills_both_nests",
)
CLIENT = """
import sys
from tasuki.client.rewards import RewardPool

with RewardPool("rewards:reward", folders=[sys.argv[1]], num_workers=3, timeout_s=float(sys.argv[2]), on_error="zero") as pool:
    scores = pool.score([{"prompt": "a"}] * len(sys.argv[3:]), sys.argv[3:])
    print(scores.num_failed, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head = f"NOTES = {str(tmp_path / 'notes')!r}\nSOURCE = {REWARDS!r}\n"
    (tmp_path / "rewards.py").write_text(head + REWARDS)
    (tmp_path / "notes").touch()
    return tmp_path


def alive(folder: Path) -> list[int]:
    return [pid for pid in map(int, (folder / "notes").read_text().split()) if not has_ended(pid)]


def check_ended(folder: Path) -> None:
    try:
        wait_for(lambda: not alive(folder))
    finally:
        for pid in alive(folder):
            os.kill(pid, signal.SIGKILL)


def begin(folder: Path, timeout_s: float, *completions: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", CLIENT, folder, str(timeout_s), *completions]
    return subprocess.Popen(argv, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("seed", [1])
def test_nothing_that_a_reward_starts_outlives_the_pool_or_keeps_its_pipe(folder: Path, seed: int):
    drawn = random.Random(seed)
    completions = [" ".join((*drawn.sample(STARTS, drawn.randint(1, 3)), end)) for end in ENDS]
    completions.extend(KILLS)
    with begin(folder, 1.5, *completions) as client:
        output, _ = client.communicate(timeout=240)  # until no process has the pipe
    assert (client.returncode, len(output.splitlines()) > 0) == (0, True), output
    check_ended(folder)


def test_nothing_outlives_a_client_that_is_killed(folder: Path):
    with begin(folder, 600, "daemonizes runs deafens hangs", "forks stops_child", "chains stops", "hangs") as client:
        wait_for(lambda: len(alive(folder)) >= 8)
        client.kill()
        client.communicate(timeout=60)
    check_ended(folder)


BOMB = """
import os, sys, time
from tasuki.wire import process_tree

def double():
    for _ in range(5):
        if not os.fork(): os.setsid()
        with open(sys.argv[2], "a") as notes:
            notes.write(f"{os.getpid()}\\n")
    time.sleep(600)

process_tree._KILL_S = 0.0
process_tree.run_nested(double, lifeline_fd=int(sys.argv[1]), mark=process_tree.new_mark())
"""


def test_a_nest_goes_on_killing_while_processes_come(folder: Path):
    theirs, lifeline = os.pipe()
    argv = [sys.executable, "-c", BOMB, str(theirs), folder / "notes"]
    with subprocess.Popen(argv, env=ENVIRONMENT, pass_fds=[theirs], start_new_session=True) as nest:
        os.close(theirs)
        wait_for(lambda: len(set(alive(folder))) == 32)
        os.close(lifeline)
        nest.wait(60)
    check_ended(folder)


def test_a_fork_that_returns_does_not_answer(folder: Path):
    (folder / "twice.py").write_text(
        "import os\ndef reward(completion):\n    child = not os.fork()\n    return -1.0 if child else float(completion)\n"
    )
    with RewardPool("twice:reward", folders=[folder], timeout_s=20) as pool:
        assert pool.score([{"prompt": "a"}] * 20, [str(number) for number in range(20)]).rewards.tolist() == list(range(20))


@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        (
            "def reward(completion, answer): return 1",
            "rewards_of:reward of {file} takes `answer`, but {rows}:3 has only prompt, text",
        ),
        ("def reward(completion, *, target): return 1", "takes `target`, but {rows}:1"),
        ("def reward(completion, /): return 1", "takes `completion` by position only"),
        ("async def reward(completion): return 1", "asynchronous"),
        ("class reward:\n def __init__(self, completion): pass", "it is a class"),
        ("import functools\nasync def other(completion): return 1\nreward = functools.partial(other)", "asynchronous"),
        ("def reward(completion): yield 1", "generator"),
    ],
)
def test_a_signature_that_the_rows_do_not_fit_is_refused_at_the_start(tmp_path: Path, signature: str, problem: str):
    (tmp_path / "rewards_of.py").write_text(signature + "\n")
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "text": "b"}]
    (file := tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    with pytest.raises(InvalidArgument) as refused, RewardPool("rewards_of:reward", folders=[tmp_path]) as pool:
        pool.check_rows(rows, path=file)
    assert problem.format(file=tmp_path / "rewards_of.py", rows=file) in refused.value.message


def test_arguments_that_rows_completions_or_defaults_give_are_accepted(tmp_path: Path):
    (tmp_path / "fitting.py").write_text("def reward(completion, num_tokens, answer, scale=1.0, *more, **fields): return 1\n")
    with RewardPool("fitting:reward", folders=[tmp_path]) as pool:
        pool.check_rows([{"prompt": "a", "answer": "b"}], path="rows.jsonl")
