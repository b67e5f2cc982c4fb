"""Time left for a call."""

from __future__ import annotations

import grpc.aio

_NO_DEADLINE_S = 600.0
"""Deadline of a read whose caller sets none; a mutating call without one is refused."""


def remaining_s(context: grpc.aio.ServicerContext) -> float:
    """Seconds until the call's deadline."""
    remaining = context.time_remaining()
    return _NO_DEADLINE_S if remaining is None else remaining
