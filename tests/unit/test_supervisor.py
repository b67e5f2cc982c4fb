"""What a node's supervisor says of its processes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.config.paths import exit_path, log_path
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.node.exit_report import (
    KILLED_FOR_MEMORY,
    explained,
    find_error,
    node_down,
    rotate,
    rotate_open,
    rotated_paths,
    why_it_ended,
    write_exit_report,
)
from tasuki.node.processes import continue_children
from tasuki.wire.errors import Draining, NodeDown, PeerUnavailable, ServiceFailed, TasukiError, UnsupportedModel
from tasuki.wire.process_tree import parent_and_state
from tests.conftest import ENVIRONMENT
from tests.limits import limit_s, wait_for


def test_a_stopped_child_is_continued_and_ends_with_its_pipe() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: parent_and_state(child.pid)[1] == "T")
    continue_children()
    child.communicate(timeout=limit_s(10.0))
    assert child.returncode == 0


def test_the_last_ones_are_kept_and_the_oldest_goes(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    for number in range(5):
        rotate(log, keep=3)
        log.write_text(str(number))
    assert [path.name for path in rotated_paths(log, keep=3)] == ["trainer.log.old", "trainer.log.old.1", "trainer.log.old.2"]
    assert [path.read_text() for path in (log, *rotated_paths(log, keep=3))] == ["4", "3", "2", "1"]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_log_is_rotated_under_its_writer_once_it_is_large(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    with log.open("ab", buffering=0) as writer:
        for text in (b"first", b"second", b"third"):
            writer.write(text)
            rotate_open(log, keep=2, limit_bytes=6)
    assert [path.read_text() for path in (log, *rotated_paths(log, keep=2)) if path.exists()] == ["third", "firstsecond"]
    rotate_open(log, keep=2, limit_bytes=5)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "trainer.log": "",
        "trainer.log.old": "third",
        "trainer.log.old.1": "firstsecond",
    }


RANK_FAILED = """\
12:00 INFO service=trainer event=start
[rank0]: Traceback (most recent call last):
[rank0]:   File "worker.py", line 3, in main
[rank0]:     load()
[rank0]: RuntimeError: no such tensor: lm_head.weight
E0101 failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "run.py", line 9, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_error_of_ours_is_taken_over_with_its_reason() -> None:
    words = find_error("12:00 INFO event=start\ntasuki: error UNSUPPORTED_MODEL: FooForCausalLM is not known\nmore\n")
    assert (words.reason, words.text) == ("UNSUPPORTED_MODEL", "FooForCausalLM is not known")


def test_first_traceback_is_shown_and_not_its_echoes() -> None:
    words = find_error(RANK_FAILED)
    assert words.reason == ""
    assert words.text.splitlines()[0] == "[rank0]: Traceback (most recent call last):"
    assert words.text.splitlines()[-1] == "[rank0]: RuntimeError: no such tensor: lm_head.weight"


def test_a_crash_in_native_code_names_the_signal_and_the_line_that_was_running() -> None:
    crash = (
        "from tasuki.rpc.logs import configure_logging; import os, signal; configure_logging('trainer')\n"
        "def sync(): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "sync()"
    )
    died = subprocess.run([sys.executable, "-c", crash], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    words = find_error("12:00 INFO service=trainer event=start\n" + died.stderr + "more\n" * 20)
    assert died.returncode == -signal.SIGSEGV
    assert words.text.startswith("Fatal Python error: Segmentation fault")
    assert "in sync" in words.text


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    log_path(tmp_path, "supervisor").parent.mkdir()
    log_path(tmp_path, "supervisor").write_text("event=started service=trainer pid=7\n")
    return NodeConfig(state_dir=tmp_path, model=ModelConfig(path=tmp_path))


@pytest.mark.parametrize("failure", [PeerUnavailable("gone"), Draining("drains"), NodeDown("has ended")])
def test_an_orderly_stop_is_a_node_that_is_down(failure: TasukiError, config: NodeConfig) -> None:
    write_exit_report(config.state_dir, reason="asked by SIGTERM", first=None, exit_codes={"trainer": 1, "rollout": -9})
    with pytest.raises(NodeDown, match="has ended: asked by SIGTERM"), explained(config):
        raise failure


@pytest.mark.parametrize("report", ["", "[]", "{}", '{"reason": 1}', "[" * 100_000, '{"reason": "r", "first": 3}'])
def test_a_damaged_report_is_none(report: str, config: NodeConfig) -> None:
    exit_path(config.state_dir).write_text(report)
    assert "has ended without a report" in why_it_ended(config).message
    assert "the last one ended" not in node_down(config.state_dir).message


def test_a_service_that_ended_too_often_is_named_in_words_with_what_it_said(config: NodeConfig) -> None:
    reason = "coordinator ended by itself, more often than restart.max_restarts allows"
    write_exit_report(
        config.state_dir, reason=reason, first="coordinator", exit_codes={"coordinator": -9}, restarts={"coordinator": 5}
    )
    log_path(config.state_dir, "coordinator").write_text("event=epoch epoch=6\n")
    error = why_it_ended(config)
    assert isinstance(error, ServiceFailed)
    assert error.message.startswith(f"{reason} (signal SIGKILL, restarted 5 times); ")
    assert error.message.endswith("coordinator.log says:\nevent=epoch epoch=6")
    log_path(config.state_dir, "coordinator").write_text("tasuki: error UNSUPPORTED_MODEL: none of ours\n")
    assert isinstance(why_it_ended(config), UnsupportedModel)


KILLED = f"rollout ended by itself before it served; {KILLED_FOR_MEMORY}: /sys/fs/cgroup/memory.max allows 1.1 GB of memory"


@pytest.mark.parametrize(
    ("reason", "process", "log", "kind", "told"),
    [
        # Its own words are not the cause.
        (
            KILLED,
            "rollout",
            "tasuki: error PEER_UNAVAILABLE: a rank is gone\n",
            ServiceFailed,
            f"{KILLED} (signal SIGKILL); see ",
        ),
        ("", "trainer", "", NodeDown, "its supervisor and guard were killed"),
        ("", "supervisor", "tasuki: error UNSUPPORTED_MODEL: none of ours\n", UnsupportedModel, "none of ours"),
        ("", "supervisor", f"{RANK_FAILED}", ServiceFailed, "no such tensor: lm_head.weight"),
    ],
)
def test_why_a_node_ended(config: NodeConfig, reason: str, process: str, log: str, kind: type[TasukiError], told: str) -> None:
    if reason:
        write_exit_report(config.state_dir, reason=reason, first=process, exit_codes={process: -9})
    log_path(config.state_dir, process).write_text(log)
    error = why_it_ended(config)
    assert isinstance(error, kind) and told in error.message
