"""The watchdog and starting processes: a slow start is no stall, a stopped process is one."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.config.paths import pulse_dir
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.node.watchdog import Stall, Watchdog
from tasuki.rollout.ranks import RankProcesses
from tasuki.rpc.heartbeat import Heartbeat, read_pulse
from tasuki.wire.process_tree import parent_and_state
from tests.limits import wait_for

STALL_S = 8.0


@pytest.fixture
def watchdog(tmp_path: Path) -> Watchdog:
    return Watchdog(tmp_path, stall_s=STALL_S, progress_s=60.0)


@pytest.fixture
def starting(tmp_path: Path, watchdog: Watchdog) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a pulse file and no beat yet."""
    with subprocess.Popen(["sleep", "600"]) as process:
        (pulse_dir(tmp_path) / f"scheduler0-{process.pid}").write_bytes(bytes(24))
        yield process
        process.kill()


def first_stall(watchdog: Watchdog, *, begin: float, end: float) -> tuple[float, Stall] | None:
    """Checks once per simulated second; returns the first stall and its time."""
    for now in range(int(begin), int(end)):
        stall = watchdog.check(now=float(now))
        if stall is not None:
            return now - begin, stall
    return None


def test_a_start_may_take_long_and_a_process_that_is_stopped_meanwhile_is_noticed(
    watchdog: Watchdog, starting: subprocess.Popen[bytes]
) -> None:
    assert first_stall(watchdog, begin=920, end=1020) is None
    starting.send_signal(signal.SIGSTOP)
    wait_for(lambda: parent_and_state(starting.pid)[1] == "T")
    found = first_stall(watchdog, begin=1020, end=1040)
    assert found is not None
    seconds, stall = found
    assert STALL_S <= seconds <= STALL_S + 1
    assert (stall.service, stall.process, stall.pid) == ("rollout", "scheduler0", starting.pid)
    assert stall.cause.startswith("no heartbeat for ")


def test_a_launched_process_that_is_stopped_without_a_pulse_is_noticed(watchdog: Watchdog) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            watchdog.launched("trainer", process.pid)
            assert first_stall(watchdog, begin=1000, end=1020) is None
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda: parent_and_state(process.pid)[1] == "T")
            found = first_stall(watchdog, begin=1020, end=1040)
            assert found is not None
            assert STALL_S <= found[0] <= STALL_S + 1
            assert (found[1].service, found[1].pid) == ("trainer", process.pid)
            watchdog.forget("trainer")
            assert first_stall(watchdog, begin=1040, end=1060) is None
        finally:
            process.kill()


def test_a_process_that_is_exiting_is_gone_and_does_not_hang(
    tmp_path: Path, watchdog: Watchdog, starting: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = pulse_dir(tmp_path).iterdir()
    path.write_bytes((1).to_bytes(8, "little") * 3)  # it has beaten
    assert first_stall(watchdog, begin=1000, end=1003) is None
    monkeypatch.setattr("tasuki.node.watchdog.is_exiting", lambda pid: pid == starting.pid)
    stall = watchdog.check(now=1003.0)
    assert stall == Stall("rollout", "scheduler0", starting.pid, "the process is gone", is_gone=True)


def test_a_transfer_in_the_background_without_progress_is_noticed_while_the_process_beats(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, stall_s=STALL_S, progress_s=60.0)
    heartbeat, moved = Heartbeat(tmp_path, "trainer0"), [0]
    heartbeat.beat_in_thread()
    (path,) = pulse_dir(tmp_path).iterdir()

    def beat() -> int:
        pulse = read_pulse(path)
        assert pulse is not None
        return pulse.beats

    def look(now: float) -> Stall | None:
        """Checks after two more beats, the second of which includes the latest progress."""
        seen = beat()
        wait_for(lambda: beat() > seen + 1)
        return watchdog.check(now=now)

    try:
        with heartbeat.transferring(lambda: moved[0]):
            for now in range(1000, 1030, 2):
                moved[0] += 1
                assert look(float(now)) is None, "it comes further"
            stalls = [stall for now in range(1030, 1044, 2) if (stall := look(float(now))) is not None]
        assert [(stall.service, stall.process) for stall in stalls][:1] == [("trainer", "trainer0")]
        assert stalls[0].cause.startswith("no progress of a transfer in the background for ")
        assert look(1050.0) is None and look(1070.0) is None, "nothing moves any more"
    finally:
        heartbeat.close()


def test_a_spawned_engine_rank_has_a_pulse_before_it_imports_the_engine(tmp_path: Path) -> None:
    ranks = RankProcesses()
    ranks.start(NodeConfig(state_dir=tmp_path, model=ModelConfig(path=tmp_path), device="cuda"))
    try:
        (pid,) = (process.pid for process in ranks.processes)
        pulse = pulse_dir(tmp_path) / f"scheduler0-{pid}"
        wait_for(pulse.exists, within_s=60.0)
        assert "sglang" not in Path(f"/proc/{pid}/maps").read_text()
    finally:
        ranks.kill()
