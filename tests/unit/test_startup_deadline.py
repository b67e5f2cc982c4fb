"""How a start that takes too long, or is told to stop, ends its process."""

import signal
import subprocess
import sys

import pytest

from tasuki.node.exit_report import find_error
from tests.conftest import ENVIRONMENT

# torch's C++ imports several modules; an exception within the fourth of these imports crashes the process.
START = """
import os, sys
from tasuki.rpc.process_start import StartupDeadline

deadline = StartupDeadline(60)
deadline.before_exit.callback(lambda: print("cleaned up", flush=True))
number, is_within, imports = int(sys.argv[1]), False, 0

def interrupt(frame, event, function):
    global is_within, imports
    if event == "c_call" and function.__name__ == "_autograd_init":
        is_within = True
    elif is_within and event == "call" and frame.f_code.co_name == "_lock_unlock_module":
        imports += 1
        if imports < 4:
            return
        sys.setprofile(None)
        os.kill(os.getpid(), number)

sys.setprofile(interrupt)
try:
    import torch
except BaseException as error:
    print("raised", error)
"""
LINE = "\ntasuki.rollout: DEADLINE_EXCEEDED: the engine did not start within coordinator.stage_timeout_s = 60 s\n"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("number", "exit_code", "line"),
    [(signal.SIGALRM, 1, LINE), (signal.SIGTERM, 128 + signal.SIGTERM, ""), (signal.SIGINT, 128 + signal.SIGINT, "")],
)
def test_a_start_ends_while_cpp_imports_modules(number: signal.Signals, exit_code: int, line: str) -> None:
    done = run(START, str(int(number)))
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "cleaned up\n", line)


FAILING = """
import os, signal, sys
from tasuki.rpc.process_start import StartupDeadline

def fail():
    os.kill(os.getpid(), signal.SIGTERM)
    raise OSError("no space")

deadline = StartupDeadline(60)
deadline.before_exit.callback(lambda: print("cleaned up", flush=True))
deadline.before_exit.callback(fail)
sys.stderr.write("Loading:  40%|##  ")
os.kill(os.getpid(), signal.SIGALRM)
"""


def test_neither_a_failing_clean_up_nor_a_second_signal_hides_the_cause() -> None:
    done = run(FAILING)
    assert (done.returncode, done.stdout) == (1, "cleaned up\n")
    assert done.stderr.startswith(f"Loading:  40%|##  {LINE}Traceback")
    assert done.stderr.endswith("OSError: no space\n")
    assert find_error(done.stderr).reason == "DEADLINE_EXCEEDED"
