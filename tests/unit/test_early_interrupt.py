"""Ctrl-C while the `tasuki` script imports its modules ends it with one line and exit code 130."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ENVIRONMENT, ROOT

# The installed script, with a signal to the process when the import of a module begins.
SCRIPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == at:
            os.kill(os.getpid(), signal.SIGINT)

at = sys.argv[1]
sys.meta_path.insert(0, Interrupt())
from tasuki.cli.entry import main
sys.argv[1:] = ["plan", "--preset", "balanced"]
sys.exit(main())
"""


def run_interrupted(module: str) -> tuple[int, str, str]:
    argv = [sys.executable, "-c", SCRIPT, module]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "module", ["tasuki.cli.__main__", "argparse", "grpc._cython", "pydantic", "tasuki.wire.printable", "tasuki.cli.plan"]
)
def test_an_interrupt_during_an_import_ends_the_command_with_one_line(module: str) -> None:
    assert run_interrupted(module) == (130, "", "tasuki: interrupted\n")


def test_without_an_interrupt_the_command_succeeds() -> None:
    code, shown, _ = run_interrupted("")
    assert code == 0
    assert "It fits." in shown


def test_the_script_is_the_one_tested() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {"tasuki": "tasuki.cli.entry:main"}
