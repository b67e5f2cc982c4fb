"""Restarts as the dashboard counts them, those by the supervisor but no start of the node; the newest lines of logs."""

import shutil
from pathlib import Path

from tasuki.dashboard.logs import RestartLogs, read_logs
from tasuki.node.exit_report import KEPT_LOGS, rotate
from tests.dashboard import RECORDED

_START = """2026-11-23 09:00:00,000 INFO service=supervisor logger=tasuki.node event=started service=coordinator pid=1
2026-11-23 09:00:00,010 INFO service=supervisor logger=tasuki.node event=started service=rollout pid=2
2026-11-23 09:00:00,020 INFO service=supervisor logger=tasuki.node event=started service=trainer pid=3
"""
_RESTART = """2026-11-23 09:05:00,000 ERROR service=supervisor logger=supervisor event=restart_asked service=coordinator cause=asked
2026-11-23 09:05:01,000 WARNING service=supervisor logger=tasuki.node event=restart service=coordinator number=1 killed=1 pause_s=0.2
2026-11-23 09:05:02,000 INFO service=supervisor logger=tasuki.node event=started service=coordinator pid=4
"""


def recorded_log(folder: Path) -> Path:
    """One start of a node, with a restart of rollout."""
    return Path(shutil.copy(RECORDED / "logs" / "supervisor.log", folder / "supervisor.log"))


def test_a_start_of_the_node_is_no_restart(tmp_path: Path) -> None:
    log = recorded_log(tmp_path)
    logs = RestartLogs(log)
    assert logs.advance() and not logs.advance()
    assert logs.read()["counts"] == {"rollout": 1} and logs.read()["counts_now"] is None
    rotate(log, keep=KEPT_LOGS)
    log.write_text(_START)
    assert logs.advance() and not logs.advance()
    told = logs.read()
    assert (told["counts"], told["counts_now"], told["num_starts"]) == ({"rollout": 1}, {}, 2)
    (restart,) = told["restarts"]
    assert (restart["service"], restart["cause"]) == ("rollout", "killed by signal 9")


def test_restarts_of_all_kept_logs_are_listed_newest_first(tmp_path: Path) -> None:
    log = recorded_log(tmp_path)
    rotate(log, keep=KEPT_LOGS)
    log.write_text(_START)
    logs = RestartLogs(log)
    logs.advance()
    assert logs.coordinator_restarts_now() == 0
    with log.open("a") as lines:
        lines.write(_RESTART)
    assert logs.advance()
    assert [(one["service"], one["cause"]) for one in logs.read()["restarts"]] == [
        ("coordinator", "asked"),
        ("rollout", "killed by signal 9"),
    ]
    assert logs.read()["counts_now"] == {"coordinator": 1} and logs.coordinator_restarts_now() == 1


def test_logs_of_all_processes_are_in_their_order_and_a_traceback_keeps_its_line(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    at = "2026-11-29 01:00:0"
    trainer = f"Python warned\n{at}2,000 ERROR service=trainer lost\nTraceback:\n  x\n{at}5,000 INFO service=trainer on\n"
    (tmp_path / "logs" / "trainer.log").write_text(trainer)
    (tmp_path / "logs" / "rollout.log").write_text(f"{at}1,000 INFO up\n{at}3,000 WARNING slow\n")
    texts = [line["text"] for line in read_logs(tmp_path, only_warnings=False)["lines"]]
    assert texts == ["Python warned", "up", "service=trainer lost", "Traceback:", "  x", "slow", "service=trainer on"]
    warned = read_logs(tmp_path, only_warnings=True)["lines"]
    assert [(line["process"], line["level"]) for line in warned] == [("trainer", "ERROR")] * 3 + [("rollout", "WARNING")]
