"""The supervisor with real processes: services that end or hang are restarted, up to the limit."""

import os
import re
import signal
import time

import pytest

from tasuki.config.paths import restart_request_path, stall_dir
from tasuki.node.processes import stop_node
from tests.integration.node_process import Start, is_alive, pids_of
from tests.limits import wait_for


def test_service_that_is_killed_is_restarted_without_its_children_and_the_others_stay(start: Start) -> None:
    node = start(max_restarts=2, first="good", second="deaf")
    node.wait_until_up()
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


def test_service_that_could_not_start_again_waits_and_uses_up_no_restart(start: Start, capfd: pytest.CaptureFixture[str]):
    node = start(max_restarts=1, first="good", second="good")
    node.wait_until_up()
    first, second = pids_of(node, "first"), pids_of(node, "second")
    hindrance = node.state_dir / "second.hindered"
    hindrance.touch()
    told: list[str] = []

    def log() -> str:
        told.append(capfd.readouterr().err)
        return "".join(told)

    os.kill(second[0], signal.SIGKILL)
    waits = "event=restart_waits service=second error=INVALID_ARGUMENT: security.cert: is away"
    wait_for(lambda: waits in log())
    time.sleep(2.5)
    assert log().count("event=restart_waits") == 1
    assert pids_of(node, "first") == first and pids_of(node, "second") == second
    hindrance.unlink()
    wait_for(lambda: len(pids_of(node, "second")) == 2 and pids_of(node, "second")[0] != second[0])
    node.pids += pids_of(node, "second")
    hindrance.touch()
    stop_node(node.state_dir)
    assert node.process.wait() == 0
    assert node.exit["restarts"] == {"second": 1}


def test_service_that_may_start_beside_another_does_so_once_and_waits_for_it_when_restarted(start: Start) -> None:
    node = start(max_restarts=2, first="late", beside="good")
    node.wait_until_recorded()
    before = {name: pids_of(node, name) for name in ("first", "beside")}
    for pids in before.values():
        os.kill(pids[0], signal.SIGKILL)
    for name, pids in before.items():
        wait_for(lambda name=name, pids=pids: len(pids_of(node, name)) == 2 and pids_of(node, name)[0] != pids[0])
        node.pids += pids_of(node, name)
    assert (node.state_dir / "beside.saw").read_text().split() == ["False", "True"]
    stop_node(node.state_dir)
    node.assert_gone()


def test_stopped_process_is_dumped_and_its_service_restarted(start: Start) -> None:
    node = start(max_restarts=2, first="good", beats="good")
    node.wait_until_up()
    before = pids_of(node, "beats")
    os.kill(before[0], signal.SIGSTOP)
    wait_for(lambda: len(pids_of(node, "beats")) == 2 and pids_of(node, "beats")[0] != before[0])
    (stacks,) = stall_dir(node.state_dir).iterdir()
    assert re.match(rf"beats, pid {before[0]}: stopped for \d+\.\d s\n", stacks.read_text())
    assert "supervised_node.py" in stacks.read_text()
    assert not is_alive(before[0])
    node.pids += pids_of(node, "beats")
    stop_node(node.state_dir)


def test_restart_that_is_asked_for_is_carried_out_once(start: Start) -> None:
    node = start(max_restarts=2, first="good")
    node.wait_until_up()
    before = pids_of(node, "first")
    restart_request_path(node.state_dir, "first").write_text("SYNC did not end")
    wait_for(lambda: len(pids_of(node, "first")) == 2 and pids_of(node, "first")[0] != before[0])
    node.pids += pids_of(node, "first")
    stop_node(node.state_dir)
    assert node.exit["restarts"] == {"first": 1}
