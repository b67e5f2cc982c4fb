"""The supervisor with real processes: whichever ends first, and however, nothing of the node is left 10 s later."""

import os
import signal
import time
from pathlib import Path

import pytest

from tasuki.config.lock import NODE_LOCK, StateLock, holder
from tasuki.config.paths import log_path, restart_request_path, socket_dir
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.node import processes
from tasuki.node.processes import stop_node
from tasuki.node.start import StartedNode, running_node
from tests.extent import IS_WHOLE
from tests.integration.node_process import LIMIT_S, Start, is_alive, pids_of
from tests.limits import wait_for


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


def test_down_removes_what_a_killed_supervisor_and_guard_left(tmp_path: Path) -> None:
    StateLock.take(tmp_path, name=NODE_LOCK).close()
    left = socket_dir(tmp_path) / "pulse"
    left.mkdir()
    with StateLock.take(tmp_path, name="trainer"):
        assert not stop_node(tmp_path)
        assert left.exists(), "a service of somebody runs there"
    assert not stop_node(tmp_path)
    assert not left.parent.exists()


def test_service_that_dies_takes_the_node_with_it(start: Start) -> None:
    node = start(max_restarts=1, first="good", second="dies")
    node.wait_until_up()
    assert node.process.wait(timeout=4 * LIMIT_S) == 1
    node.pids += pids_of(node, "second")
    node.assert_gone()
    assert (node.exit["reason"], node.exit["first"]) == (
        "second ended by itself, more often than restart.max_restarts allows",
        "second",
    )
    assert (node.exit["services"]["second"], node.exit["restarts"]) == ({"exit_code": 7}, {"second": 1})


def test_killed_supervisor_leaves_nothing_behind(start: Start) -> None:
    node = start(first="good", second="deaf")
    node.wait_until_recorded()
    supervisor_pid = node.supervisor_pid
    assert supervisor_pid != node.process.pid
    log_path(node.state_dir, "supervisor").write_text("INFO tasuki.node event=restart service=first number=1\n" * 3)
    os.kill(supervisor_pid, signal.SIGKILL)
    node.process.wait(timeout=LIMIT_S)
    node.assert_gone()
    assert (node.exit["reason"], node.exit["restarts"]) == ("the supervisor was killed by SIGKILL", {"first": 3})


def test_killed_guard_leaves_nothing_behind(start: Start) -> None:
    node = start(first="good", second="deaf")
    node.wait_until_recorded()
    os.kill(node.process.pid, signal.SIGKILL)
    node.process.wait()
    node.assert_gone()
    assert node.exit["reason"] == "the guard was killed"


def test_node_that_was_handed_over_outlives_its_starter(start: Start) -> None:
    node = start(first="good")
    node.wait_until_up()
    os.write(node.starter_fd, b"1")
    os.close(node.starter_fd)
    time.sleep(1.0)
    assert holder(node.state_dir, name=NODE_LOCK) == node.supervisor_pid
    assert all(is_alive(pid) for pid in node.pids)
    stop_node(node.state_dir)
    node.assert_gone()


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.6] if IS_WHOLE else [0.3])
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


def test_a_pause_of_the_supervisor_or_its_guard_is_no_order_to_stop(start: Start) -> None:
    node = start(first="good")
    node.wait_until_up()
    for pid in (node.supervisor_pid, node.process.pid) * 3:
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


def test_down_continues_what_was_stopped(start: Start) -> None:
    node = start(first="good", second="good")
    node.wait_until_recorded()
    first, _, _, child_of_second = node.pids
    for pid in (first, child_of_second):
        os.kill(pid, signal.SIGSTOP)
    assert stop_node(node.state_dir)
    node.assert_gone()
    assert node.exit["services"] == {"first": {"stopped": True}, "second": {"stopped": True}}


def test_a_guard_that_does_not_end_after_its_supervisor_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    node = start(first="good")
    node.wait_until_up()
    monkeypatch.setattr("tasuki.node.processes.STOP_TIMEOUT_S", 3.0)
    send = processes._signal

    def send_no_wake(pid: int, number: signal.Signals) -> None:
        if (pid, number) != (node.process.pid, signal.SIGCONT):
            send(pid, number)

    monkeypatch.setattr("tasuki.node.processes._signal", send_no_wake)
    os.kill(node.process.pid, signal.SIGSTOP)
    assert stop_node(node.state_dir)
    assert node.process.wait(timeout=LIMIT_S) == -signal.SIGKILL
    node.assert_gone()


def test_a_node_that_does_not_end_in_time_changes_nothing_about_how_the_run_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path))
    said: list[str] = []

    def start_node(*_: object, **__: object) -> StartedNode:
        node = start(first="deaf")
        node.wait_until_up()
        return StartedNode(config, node.process, starter_fd=node.starter_fd)

    monkeypatch.setattr("tasuki.node.start.start_node", start_node)
    monkeypatch.setattr("tasuki.node.processes.STOP_TIMEOUT_S", 0.0)
    with running_node(config, tell=said.append):
        pass
    assert len(said) == 1 and said[0].startswith("tasuki: the node has not stopped in 0 s: pid ")
    wait_for(lambda: holder(config.state_dir, name=NODE_LOCK) is None)
