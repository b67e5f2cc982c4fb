"""Time limits of tests about processes: as a user is promised them, and a minute where other tests run at the same time."""

from __future__ import annotations

import os

_SHARED_S = 60.0
"""Enough for two workers on two cores, each with a node of several processes, beside whatever else the machine does."""


def limit_s(seconds: float) -> float:
    """`seconds`, or at least a minute for a worker of pytest-xdist."""
    return max(seconds, _SHARED_S) if "PYTEST_XDIST_WORKER" in os.environ else seconds
