"""Seconds that an engine rank spends in parts of SGLang's start."""

from __future__ import annotations

import functools
import time
from typing import Any

_PARTS = {"load_model": "weights", "alloc_memory_pool": "KV cache", "init_cuda_graphs": "graphs"}
"""Methods of SGLang's model runner, none of which calls another."""


def count_seconds(runner: type[Any]) -> dict[str, float]:
    """Measures these methods from now on. Returns seconds by part, filled as they run."""
    parts: dict[str, float] = {}
    for method, part in _PARTS.items():
        setattr(runner, method, _timed(getattr(runner, method), part, parts))
    return parts


def _timed(method: Any, part: str, parts: dict[str, float]) -> Any:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        try:
            return method(*args, **kwargs)
        finally:
            parts[part] = parts.get(part, 0.0) + time.monotonic() - started

    return timed
