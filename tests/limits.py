"""Time limits of process tests: as promised to users, and longer if other tests run at the same time."""

from __future__ import annotations

import os

_SHARED = 10.0
"""Factor for two workers on two cores, each with a node of several processes, on a machine with other load."""


def limit_s(seconds: float) -> float:
    """Returns `seconds`, or a multiple of it in a pytest-xdist worker."""
    return seconds * _SHARED if "PYTEST_XDIST_WORKER" in os.environ else seconds
