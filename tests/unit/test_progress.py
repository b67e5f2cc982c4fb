import json
import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tasuki.cli.progress import ProgressDisplay
from tasuki.client.progress import RESTARTED, Progress, ProgressRecord
from tasuki.client.step import Step
from tasuki.config.paths import log_path, socket_dir
from tasuki.runs.progress import progress_line, progress_path, read_progress, written_progress
from tests.limits import wait_for


def test_progress_counts_completions_and_says_when_a_call_is_repeated() -> None:
    progress = Progress(num_steps=4)
    progress.begin(1, "generate", total=6)
    greedy, sampled = progress.counter(), None
    greedy(0, 0)
    greedy(2, 10)
    sampled = progress.counter()
    sampled(0, 0)
    sampled(3, 40)
    record = progress.record()
    assert (record.step, record.steps, record.done, record.total, record.waits_for) == (1, 4, 5, 6, "")
    assert record.tokens_per_second == pytest.approx(50 / record.activity_s, rel=0.5)
    sampled(0, 0)
    record = progress.record()
    assert (record.done, record.waits_for) == (2, RESTARTED)
    progress.begin(1, "reward")
    assert (progress.record().done, progress.record().waits_for, progress.record().tokens_per_second) == (0, "", None)


def test_time_left_counts_the_steps_and_evaluations_to_come() -> None:
    progress = Progress(num_steps=10, eval_every=4)
    assert progress.record().eta_s is None
    progress.finished(Step(0, num_policy_steps=1, seconds={"evaluate": 30.0, "generate": 6.0}))
    progress.finished(Step(1, num_policy_steps=1, seconds={"generate": 10.0}))
    progress.begin(2, "generate")
    assert progress.record().tokens_per_second is None
    # Eight steps of 8 s; evaluations at 4, 8 and the end.
    assert progress.record().eta_s == pytest.approx(8 * 8.0 + 3 * 30.0, abs=1.0)
    progress.finished(
        Step(9, num_policy_steps=1, metrics={"num_read_tokens": 600.0}, seconds={"evaluate": 30.0, "optim_step": 6.0})
    )
    assert progress.record().tokens_per_second is None
    progress.begin(10, "forward_backward")
    assert progress.record().tokens_per_second == 100.0
    progress.begin(10, "evaluate")
    assert progress.record().eta_s == pytest.approx(30.0, abs=1.0)
    progress.begin(5, "export")  # stopped early
    assert progress.record().eta_s is None


def test_time_left_does_not_jump_between_short_and_long_steps() -> None:
    progress = Progress(num_steps=100)
    progress.begin(50, "generate")
    for number, seconds in enumerate([1.0, 9.0] * 8 + [1.0, 1000.0]):
        progress.finished(Step(number, num_policy_steps=1, seconds={"generate": seconds}))
    assert progress.record().eta_s == pytest.approx(50 * 5.0, rel=0.1)


def test_progress_is_a_file_while_the_command_lives(tmp_path: Path) -> None:
    progress, shown = Progress(num_steps=3), list[ProgressRecord]()
    progress.begin(2, "forward_backward", done=1, total=4)
    with written_progress(progress, tmp_path, show=shown.append):
        wait_for(lambda: read_progress(tmp_path) is not None)
        record = read_progress(tmp_path)
        assert record is not None and (record.activity, record.done, record.total, record.step) == ("forward_backward", 1, 4, 2)
        assert progress_path(tmp_path).stat().st_mode & 0o077 == 0
        assert record.updated_at == pytest.approx(time.time(), abs=60)
    assert shown
    assert list(tmp_path.iterdir()) == []
    progress_path(tmp_path).write_text(json.dumps({"activity": 3}))
    assert read_progress(tmp_path) is None


def test_a_line_has_part_counts_speed_and_time_left() -> None:
    record = ProgressRecord(
        activity="generate", done=37, total=256, tokens_per_second=812.4, step=3, steps=40, activity_s=12.0, eta_s=11_100.0
    )
    assert progress_line(record) == "step 3/40  generate 37 of 256, 812 tokens/s  12 s  about 3 h 05 min left"
    assert progress_line(ProgressRecord(activity="to_train", waits_for="no room")) == "step 0/0  to_train  0 s  no room"
    waiting = progress_line(replace(record, waits_for="rollout restarts"))
    assert waiting.endswith("about 3 h 05 min left without this wait  rollout restarts")
    dead = progress_line(replace(record, updated_at=time.time() - 60))
    assert dead == "step 3/40  stopped or killed 60 s ago; continue it with: tasuki train CONFIG --resume"


def test_a_restart_of_a_service_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=3)
    display = ProgressDisplay(progress, tmp_path)
    log = log_path(tmp_path, "supervisor")
    log.parent.mkdir()
    later = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + 60))
    lines = [
        f"{moment},000 INFO tasuki.node event={event} service={service} {figures}"
        for moment, service in (("2026-01-01 00:00:00", "trainer"), (later, "rollout"))
        for event, figures in (("ended", "pid=7 exit_code=-9"), ("restart", "number=1 killed=3 pause_s=0.5"))
    ]
    log.write_text("\n".join(lines) + "\n")
    progress.begin(1, "generate", total=8)
    for _ in range(2):
        display._show(progress.record())
    assert capsys.readouterr().err.splitlines() == ["rollout restarts: killed by signal 9; the run goes on once it serves"]
    with log.open("a") as file:
        file.writelines(line.replace("rollout", "coordinator").replace(",000", ",500") + "\n" for line in lines[2:])
    display._show(progress.record())
    whole = "rollout restarts: killed by signal 9, coordinator restarts: killed by signal 9"
    assert progress.record().waits_for == whole
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(socket_dir(tmp_path) / "coordinator.sock"))
        server.listen()
        display._show(progress.record())
        assert progress.record().waits_for == "rollout restarts: killed by signal 9"


def test_a_terminals_line_is_cleared_before_others_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    display = ProgressDisplay(Progress(), tmp_path)
    display._is_terminal = True
    display._show(ProgressRecord(activity="generate", done=3, total=1000, step=1, steps=5))
    display.write("interrupted", is_warning=True)
    display._show(ProgressRecord(activity="reward", step=1, steps=5))
    display._show(ProgressRecord(activity="stop", step=1, steps=5))
    clear = "\r\x1b[K"
    shown = ("step 1/5  generate 3 of 1000 ", "interrupted\n", "step 1/5  reward  0 s", "")
    assert capsys.readouterr().err == "".join(f"{clear}{line}" for line in shown)


def test_progress_without_a_terminal_is_seldom_and_plain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    display = ProgressDisplay(Progress(), tmp_path)
    record = ProgressRecord(activity="evaluate", step=0, steps=5, activity_s=11.0)
    display._show(record)
    assert capsys.readouterr().err == ""
    display._last_line -= 10.0
    display._show(record)
    display._show(record)
    assert capsys.readouterr().err == "step 0/5  evaluate  11 s\n"
