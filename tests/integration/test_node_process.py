"""The supervisor with real processes: whatever ends first, and however, nothing of the node is left 10 s later."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.node import stop_node
from tasuki.config.lock import NODE_LOCK, StateLock, holder
from tasuki.config.places import exit_path, log_path, restart_request_path, socket_dir, stall_dir
from tasuki.wire.errors import DeadlineExceeded, NodeRunning

NODE = Path(__file__).with_name("supervised_node.py")
LIMIT_S = 10.0


@dataclass
class Node:
    """A supervised node of test services, and what it has at its best."""

    state_dir: Path
    process: subprocess.Popen[bytes]
    starter_fd: int
    names: list[str]
    pids: list[int] = field(default_factory=list)

    def wait_until_up(self) -> None:
        files = [self.state_dir / f"{name}.pids" for name in self.names]
        wait_for(lambda: all(file.exists() and len(file.read_text().split()) == 2 for file in files))
        self.pids = [int(pid) for file in files for pid in file.read_text().split()]

    @property
    def supervisor_pid(self) -> int:
        pid = holder(self.state_dir, name=NODE_LOCK)
        assert pid is not None
        return pid

    def assert_gone(self) -> None:
        wait_for(lambda: holder(self.state_dir, name=NODE_LOCK) is None)
        assert [pid for pid in (self.process.pid, *self.pids) if is_alive(pid)] == []
        assert list(socket_dir(self.state_dir).iterdir()) == []
        shm = Path("/dev/shm")
        assert [file for file in shm.glob("tasuki-test-*") if int(file.name.split("-")[2]) in self.pids] == []
        semaphores = [file.read_text().removeprefix("/") for file in self.state_dir.glob("*.semaphore")]
        assert len(semaphores) == len(self.names)
        assert [name for name in semaphores if (shm / f"sem.{name}").exists()] == []

    @property
    def exit(self) -> dict[str, Any]:
        return json.loads(exit_path(self.state_dir).read_text())


def wait_for(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    nodes: list[Node] = []

    def start(max_restarts: int = 0, **kinds: str) -> Node:
        state_dir = tmp_path / "state"
        lock = StateLock.take(state_dir, name=NODE_LOCK)
        read_fd, starter_fd = os.pipe()
        argv = [sys.executable, str(NODE), str(state_dir), str(lock.fd), str(read_fd), str(max_restarts)]
        argv += [f"{name}={kind}" for name, kind in kinds.items()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(argv, pass_fds=(lock.fd, read_fd), start_new_session=True, env=environment)
        lock.close()
        os.close(read_fd)
        nodes.append(Node(state_dir, process, starter_fd, list(kinds)))
        return nodes[-1]

    yield start
    for node in nodes:
        for pid in (node.process.pid, *node.pids):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        node.process.wait()
        shutil.rmtree(socket_dir(node.state_dir))


def test_stop_ends_services_and_their_children_and_says_how(start: Start) -> None:
    node = start(first="good", second="deaf")
    node.wait_until_up()
    started = time.monotonic()
    assert stop_node(node.state_dir)
    assert time.monotonic() - started < LIMIT_S
    assert node.process.wait() == 0
    node.assert_gone()
    assert (node.exit["reason"], node.exit["first"]) == ("asked by SIGTERM", None)
    assert node.exit["services"] == {"first": {"stopped": True}, "second": {"signal": "SIGKILL"}}
    assert not stop_node(node.state_dir)


def test_service_that_dies_takes_the_node_with_it(start: Start) -> None:
    node = start(first="good", second="dies")
    node.wait_until_up()
    assert node.process.wait(timeout=2 * LIMIT_S) == 1
    node.assert_gone()
    assert (node.exit["reason"], node.exit["first"]) == (
        "second ended by itself once more than restart.max_restarts allows",
        "second",
    )
    assert node.exit["services"]["second"] == {"exit_code": 7}


def test_service_that_is_killed_takes_the_node_with_it(start: Start) -> None:
    node = start(first="good", second="good")
    node.wait_until_up()
    time.sleep(
        2.0
    )  # the supervisor looks a few times a second who holds which shared memory; a killed process can tell no more
    os.kill(node.pids[0], signal.SIGKILL)
    assert node.process.wait(timeout=LIMIT_S) == 1
    node.assert_gone()
    assert node.exit["services"]["first"] == {"signal": "SIGKILL"}


def test_killed_supervisor_leaves_nothing_behind(start: Start) -> None:
    node = start(first="good", second="deaf")
    node.wait_until_up()
    supervisor_pid = node.supervisor_pid
    assert supervisor_pid != node.process.pid
    os.kill(supervisor_pid, signal.SIGKILL)
    node.process.wait(timeout=LIMIT_S)
    node.assert_gone()
    assert node.exit["reason"] == "the supervisor was killed by SIGKILL"


def test_killed_guard_leaves_nothing_behind(start: Start) -> None:
    node = start(first="good", second="deaf")
    node.wait_until_up()
    os.kill(node.process.pid, signal.SIGKILL)
    node.process.wait()
    node.assert_gone()


def test_starter_that_is_killed_takes_the_node_with_it(start: Start) -> None:
    node = start(first="good")
    node.wait_until_up()
    os.close(node.starter_fd)
    assert node.process.wait(timeout=LIMIT_S) == 0
    node.assert_gone()
    assert node.exit["reason"] == "the process that started the node ended"


def test_node_that_was_let_go_outlives_its_starter(start: Start) -> None:
    node = start(first="good")
    node.wait_until_up()
    os.write(node.starter_fd, b"1")
    os.close(node.starter_fd)
    time.sleep(1.0)
    assert holder(node.state_dir, name=NODE_LOCK) == node.supervisor_pid
    assert all(is_alive(pid) for pid in node.pids)
    stop_node(node.state_dir)
    node.assert_gone()


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.6])
def test_interrupt_while_the_node_starts_leaves_nothing_behind(start: Start, after_s: float) -> None:
    node = start(first="good", second="good")
    time.sleep(after_s)
    os.close(node.starter_fd)
    stop_node(node.state_dir)
    node.process.wait(timeout=LIMIT_S)
    for file in node.state_dir.glob("*.pids"):
        node.pids += [int(pid) for pid in file.read_text().split()]
    wait_for(lambda: holder(node.state_dir, name=NODE_LOCK) is None)
    assert [pid for pid in node.pids if is_alive(pid)] == []


def test_second_node_on_the_state_folder_is_refused_and_names_the_pid(start: Start) -> None:
    node = start(first="good")
    node.wait_until_up()
    with pytest.raises(NodeRunning, match=f"pid {node.supervisor_pid} already runs a node on") as refused:
        StateLock.take(node.state_dir, name=NODE_LOCK)
    assert refused.value.metadata["pid"] == str(node.supervisor_pid)
    stop_node(node.state_dir)
    StateLock.take(node.state_dir, name=NODE_LOCK).close()


def test_sockets_are_in_the_run_folder_and_logs_in_the_state_folder(start: Start) -> None:
    node = start(first="good")
    node.wait_until_up()
    assert (socket_dir(node.state_dir) / "first.sock").is_socket()
    assert log_path(node.state_dir, "first").is_file()
    stop_node(node.state_dir)
    assert log_path(node.state_dir, "first").is_file()


def pids_of(node: Node, name: str) -> list[int]:
    return [int(pid) for pid in (node.state_dir / f"{name}.pids").read_text().split()]


def test_service_that_is_killed_is_started_anew_without_its_children_and_the_others_stay(start: Start) -> None:
    node = start(max_restarts=2, first="good", second="deaf")
    node.wait_until_up()
    time.sleep(0.5)  # the supervisor has seen both serve
    first, second = pids_of(node, "first"), pids_of(node, "second")
    os.kill(second[0], signal.SIGKILL)
    wait_for(lambda: len(pids_of(node, "second")) == 2 and pids_of(node, "second")[0] != second[0])
    assert [pid for pid in second if is_alive(pid)] == []
    assert pids_of(node, "first") == first
    assert all(is_alive(pid) for pid in first)
    node.pids += pids_of(node, "second")
    stop_node(node.state_dir)
    assert node.process.wait() == 0
    assert node.exit["restarts"] == {"second": 1}


def test_service_that_dies_again_and_again_ends_the_node_after_its_restarts(start: Start) -> None:
    node = start(max_restarts=2, first="good", second="dies")
    node.wait_until_up()
    assert node.process.wait(timeout=3 * LIMIT_S) == 1
    assert (node.exit["first"], node.exit["restarts"]) == ("second", {"second": 2})


def test_service_that_ends_before_it_serves_is_not_tried_again(start: Start) -> None:
    node = start(max_restarts=2, first="good", second="fails")
    assert node.process.wait(timeout=LIMIT_S) == 1
    assert (node.exit["reason"], node.exit["restarts"]) == ("second ended by itself before it served", {})


def test_process_without_a_heartbeat_is_dumped_and_its_service_started_anew(start: Start) -> None:
    node = start(max_restarts=2, first="good", beats="good")
    node.wait_until_up()
    time.sleep(1.0)
    before = pids_of(node, "beats")
    os.kill(before[0], signal.SIGSTOP)
    wait_for(lambda: len(pids_of(node, "beats")) == 2 and pids_of(node, "beats")[0] != before[0])
    (stacks,) = stall_dir(node.state_dir).iterdir()
    assert f"beats, pid {before[0]}: no heartbeat for 2." in stacks.read_text()
    assert "supervised_node.py" in stacks.read_text()
    assert not is_alive(before[0])
    node.pids += pids_of(node, "beats")
    stop_node(node.state_dir)


def test_restart_that_is_asked_for_is_carried_out_once(start: Start) -> None:
    node = start(max_restarts=2, first="good")
    node.wait_until_up()
    time.sleep(0.5)
    before = pids_of(node, "first")
    restart_request_path(node.state_dir, "first").write_text("SYNC did not end")
    wait_for(lambda: len(pids_of(node, "first")) == 2 and pids_of(node, "first")[0] != before[0])
    node.pids += pids_of(node, "first")
    stop_node(node.state_dir)
    assert node.exit["restarts"] == {"first": 1}


@pytest.mark.parametrize("who", ["supervisor", "guard"])
def test_a_pause_of_the_supervisor_or_its_guard_is_no_order_to_stop(start: Start, who: str) -> None:
    node = start(first="good")
    node.wait_until_up()
    pid = node.supervisor_pid if who == "supervisor" else node.process.pid
    for _ in range(5):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.25)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.15)
    assert node.process.poll() is None
    assert all(is_alive(pid) for pid in node.pids)
    stop_node(node.state_dir)
    assert node.process.wait() == 0
    node.assert_gone()
    assert node.exit["reason"] == "asked by SIGTERM"


def test_supervisor_that_fails_by_itself_leaves_nothing_behind_and_says_why(start: Start) -> None:
    node = start(max_restarts=2, first="good", second="deaf")
    node.wait_until_up()
    restart_request_path(node.state_dir, "first").mkdir()  # where a file is expected
    assert node.process.wait(timeout=2 * LIMIT_S) == 1
    node.assert_gone()
    assert node.exit["reason"].startswith("the supervisor failed: IsADirectoryError")
    assert node.exit["services"]["second"] == {"signal": "SIGKILL"}


def test_node_whose_reports_cannot_be_written_is_stopped_all_the_same(start: Start) -> None:
    node = start(first="good", second="deaf")
    node.wait_until_up()
    exit_path(node.state_dir).with_suffix(".part").mkdir()
    stop_node(node.state_dir)
    assert node.process.wait() == 0
    node.assert_gone()
    assert not exit_path(node.state_dir).exists()


def test_process_without_a_heartbeat_goes_also_where_its_stacks_cannot_be_written(start: Start) -> None:
    node = start(max_restarts=2, first="good", beats="good")
    stall_dir(node.state_dir).write_text("no folder")
    node.wait_until_up()
    time.sleep(1.0)
    before = pids_of(node, "beats")
    logs = log_path(node.state_dir, "beats").parent
    logs.rename(logs.with_name("away"))
    logs.write_text("no folder")  # nor can a new log
    os.kill(before[0], signal.SIGSTOP)
    wait_for(lambda: len(pids_of(node, "beats")) == 2 and pids_of(node, "beats")[0] != before[0])
    node.pids += pids_of(node, "beats")
    stop_node(node.state_dir)
    assert node.process.wait() == 0
    assert node.exit["restarts"] == {"beats": 1}


def test_down_ends_a_node_whose_supervisor_was_stopped(start: Start) -> None:
    node = start(first="good")
    node.wait_until_up()
    os.kill(node.supervisor_pid, signal.SIGSTOP)
    assert stop_node(node.state_dir)
    node.assert_gone()


def test_down_says_who_keeps_a_node_from_ending_and_what_to_do(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    node = start(first="good")
    node.wait_until_up()
    monkeypatch.setattr("tasuki.cli.node.STOP_TIMEOUT_S", 3.0)
    os.kill(node.process.pid, signal.SIGSTOP)
    with pytest.raises(
        DeadlineExceeded, match=f"pid {node.process.pid} is stopped; let it go on with kill -CONT {node.process.pid}"
    ):
        stop_node(node.state_dir)
    os.kill(node.process.pid, signal.SIGCONT)
    assert node.process.wait(timeout=LIMIT_S) == 0
    node.assert_gone()
