"""What the benchmarks ask of a machine before they begin."""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def require_gpus(num_gpus: int = 1) -> None:
    """Ends the program with one line and exit code 2 where CUDA shows fewer."""
    num_shown = torch.cuda.device_count()
    if num_shown < num_gpus:
        name = Path(sys.argv[0]).stem
        sys.stderr.write(f"{name}: needs {num_gpus} GPU{'s' * (num_gpus > 1)}, and CUDA shows {num_shown} here\n")
        raise SystemExit(2)
