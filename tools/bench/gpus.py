"""Checks of the command line and the machine before a benchmark begins."""

import sys
from argparse import ArgumentTypeError
from pathlib import Path

import torch


def at_least_one(text: str) -> int:
    """Reads a number from 1 upwards from the command line. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def require_gpus(num_gpus: int = 1) -> None:
    """Ends the program with one line and exit code 2 where CUDA shows fewer."""
    num_shown = torch.cuda.device_count()
    if num_shown < num_gpus:
        name = Path(sys.argv[0]).stem
        sys.stderr.write(f"{name}: needs {num_gpus} GPU{'s' * (num_gpus > 1)}, and CUDA shows {num_shown} here\n")
        raise SystemExit(2)
