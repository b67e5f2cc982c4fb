"""Prints tables on a terminal, or as plain lines for files and pipes."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType

# Wide enough that paths of sockets are rarely folded.
_FILE_WIDTH = 140


def print_text(text: RenderableType) -> None:
    """Prints to stdout. Elsewhere than on a terminal, lines are 140 wide at most, without trailing spaces."""
    if Console().is_terminal:
        Console().print(text, highlight=False)
        return
    console = Console(width=_FILE_WIDTH)
    with console.capture() as captured:
        console.print(text, highlight=False)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
