"""The folder of a fleet's test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own folder: a unix socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="tasuki-"))
    yield folder
    shutil.rmtree(folder)
