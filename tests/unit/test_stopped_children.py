"""A stopped child, which would be left behind when its parent ends."""

from __future__ import annotations

import signal
import subprocess
import time

from tasuki.node.processes import continue_children, parent_and_state
from tests.limits import limit_s


def test_a_stopped_child_is_continued_and_ends_with_its_pipe() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    child.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + limit_s(10.0)
    while parent_and_state(child.pid)[1] != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    continue_children()
    child.communicate(timeout=limit_s(10.0))
    assert child.returncode == 0
