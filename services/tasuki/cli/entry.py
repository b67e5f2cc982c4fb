"""Entry point of the `tasuki` script. Ctrl-C ends the command also while its modules are imported, which takes 0.3 s."""

import os
import signal  # and nothing that takes longer: until `main` runs, Ctrl-C prints a traceback


def main() -> int:
    """Imports and runs the command. Returns its exit code."""
    signal.signal(signal.SIGINT, _end)
    from tasuki.cli.__main__ import main as run

    return run()


def _end(number: int, frame: object) -> None:
    """Ends the process at once. Nothing has started yet, and an import may catch an exception or raise another in its place."""
    os.write(2, b"tasuki: interrupted\n")
    os._exit(128 + number)
