"""A rank's single report to the front through its start pipe: what it holds, or why it could not start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypedDict

from tasuki.wire.errors import TasukiError


class RankReport(TypedDict, total=False):
    """With status "ready" what the rank holds, otherwise the problem. reason: of a TasukiError.

    plan_problem: why the rank could not record its copy plan ahead of the first sync; empty if it did.
    """

    status: str
    reason: str
    problem: str
    max_total_num_tokens: int
    max_req_input_len: int
    max_running_requests: int
    weight_bytes: int
    kv_cache_bytes: int
    start_seconds: dict[str, float]
    plan_problem: str


@contextmanager
def reporting(pipe_writer: Connection) -> Iterator[None]:
    """Reports to the front why the rank could not start."""
    try:
        yield
    except TasukiError as error:
        pipe_writer.send(RankReport(status="failed", reason=error.reason, problem=error.message))
        raise
    except Exception as error:
        pipe_writer.send(RankReport(status="failed", problem=f"{type(error).__name__}: {error}"))
        raise
