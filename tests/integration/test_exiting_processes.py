"""Processes of a node that the kernel needs long to end: nothing takes them for ended, nor for stuck."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.node.processes import is_exiting
from tasuki.node.stop import stop_node
from tests.integration.exiting_process import hold
from tests.integration.node_process import Node, Start, nodes_in, pids_of, wait_for

_REPOSITORY = Path(__file__).resolve().parents[2]
_PROBE = (
    "import os; from tests.integration.exiting_process import fork_init, hold\n"
    "init, traced = fork_init(); hold(traced); os.kill(init, 9)\n"
)
_MAY_UNSHARE = subprocess.run([sys.executable, "-c", _PROBE], cwd=_REPOSITORY, check=False, stderr=subprocess.DEVNULL)
pytestmark = pytest.mark.skipif(_MAY_UNSHARE.returncode != 0, reason="needs pid namespaces and ptrace")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with nodes_in(tmp_path) as start:
        yield start


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


def go_on(parent: Any) -> None:
    parent.stdin.write(b"\n")
    parent.stdin.close()
