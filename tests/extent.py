"""Extent of the long proofs: a sample of each in `make test`, all of it in `make chaos`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import cycle, islice, product
from typing import Any

import pytest

IS_WHOLE = os.environ.get("TASUKI_PROOFS") == "whole"

only_whole = pytest.mark.skipif(not IS_WHOLE, reason="repeats what other tests show: in `make chaos`")


def crossed(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns all combinations in `make chaos`; in `make test` as many as the longest axis, so that every value occurs."""
    values = [list(axis) for axis in axes]
    if IS_WHOLE:
        return list(product(*values))
    longest = max(map(len, values))
    return list(zip(*(islice(cycle(axis), longest) for axis in values), strict=True))


def examples(num_whole: int) -> int:
    """Returns Hypothesis's number of examples: `num_whole` in `make chaos`, an eighth of it in `make test`."""
    return num_whole if IS_WHOLE else max(5, num_whole // 8)
