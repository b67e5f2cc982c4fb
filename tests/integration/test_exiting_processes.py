"""Processes of a node that the kernel needs long to end: nothing takes them for ended, nor for stuck."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasuki.node.processes import is_exiting, stop_node
from tests.integration.exiting_process import hold
from tests.integration.node_process import Node, Start, pids_of
from tests.limits import wait_for

_REPOSITORY = Path(__file__).resolve().parents[2]
_PROBE = (
    "import os; from tests.integration.exiting_process import fork_init, hold\n"
    "init, traced = fork_init(); hold(traced); os.kill(init, 9)\n"
)
_MAY_UNSHARE = subprocess.run([sys.executable, "-c", _PROBE], cwd=_REPOSITORY, check=False, stderr=subprocess.DEVNULL)
pytestmark = pytest.mark.skipif(_MAY_UNSHARE.returncode != 0, reason="needs pid namespaces and ptrace")


def lingering(node: Node, name: str) -> tuple[int, Callable[[], object]]:
    """The child of the service that will be exiting once it is killed, and what ends it."""
    init, traced = map(int, (node.state_dir / f"{name}.lingering").read_text().split())
    node.pids += [init, traced]
    return init, hold(traced)


def is_new(node: Node, name: str, before: list[int]) -> bool:
    return len(pids_of(node, name)) == 2 and pids_of(node, name)[0] != before[0]


def test_a_restart_waits_for_an_exiting_process_and_a_service_that_ends_meanwhile_is_restarted(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    node = start(max_restarts=2, first="good", second="lingers")
    node.wait_until_recorded()
    before = {name: pids_of(node, name) for name in ("first", "second")}
    init, release = lingering(node, "second")
    os.kill(before["second"][0], signal.SIGKILL)
    wait_for(lambda: is_exiting(init))
    os.kill(before["first"][0], signal.SIGKILL)
    said = ""

    def waits() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return f"event=waits_for_exit pids={init}\n" in said

    wait_for(waits)
    time.sleep(1.0)
    assert is_exiting(init)
    assert not is_new(node, "second", before["second"])
    release()
    for name, pids in before.items():
        wait_for(lambda name=name, pids=pids: is_new(node, name, pids))
        node.pids += pids_of(node, name)
    stop_node(node.state_dir)
    node.assert_gone()
    assert node.exit["restarts"] == {"first": 1, "second": 1}


def test_stop_waits_for_an_exiting_process_and_says_so_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    node = start(first="good", second="lingers")
    node.wait_until_up()
    init, release = lingering(node, "second")
    os.kill(init, signal.SIGKILL)
    wait_for(lambda: is_exiting(init))
    monkeypatch.setattr("tasuki.node.processes.STOP_TIMEOUT_S", 4.0)
    said: list[str] = []
    with ThreadPoolExecutor() as pool:
        stopped = pool.submit(stop_node, node.state_dir, tell=said.append)
        wait_for(lambda: bool(said) or stopped.done())
        time.sleep(1.0)
        assert not stopped.done()
        release()
        assert stopped.result()
    assert said == [f"waiting for pid {init}, which is exiting: the kernel is freeing its memory"]
    node.assert_gone()


@contextmanager
def above_held_init(program: str) -> Iterator[tuple[Any, int, Callable[[], object]]]:
    """Runs a program that prints an init and the process below it, and then waits for a line. Yields it, the init, and what ends that."""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        init, traced = map(int, parent.stdout.readline().split())
        yield parent, init, hold(traced)


def go_on(parent: Any) -> None:
    parent.stdin.write(b"\n")
    parent.stdin.close()


def test_a_process_that_waits_for_an_exiting_one_is_not_killed() -> None:
    program = (
        "import os\n"
        "from tasuki.node.processes import end_descendants\nfrom tasuki.wire.process_tree import adopt_orphans\n"
        "from tests.integration.exiting_process import fork_init\n"
        "adopt_orphans()\n"
        "codes = {}\n"
        "launcher = os.fork()\n"
        "if launcher == 0:\n"
        "    init, traced = fork_init()\n"
        "    print(init, traced, flush=True)\n"
        "    os.waitpid(init, 0)\n"
        "    os._exit(7)\n"
        "input()\n"
        "end_descendants(grace_s=0.0, kill_s=10.0, watch=codes.update)\n"
        "print(codes[launcher], flush=True)\n"
    )
    with above_held_init(program) as (parent, init, release):
        os.kill(init, signal.SIGKILL)
        wait_for(lambda: is_exiting(init))
        go_on(parent)
        assert not select.select([parent.stdout], [], [], 1.0)[0]
        release()
        assert parent.stdout.readline() == b"7\n"
