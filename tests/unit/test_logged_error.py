"""Excerpt of an ended service's log that is shown to the user."""

from __future__ import annotations

import signal
import subprocess
import sys

from tasuki.node.exit_report import find_error
from tests.conftest import ENVIRONMENT

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
