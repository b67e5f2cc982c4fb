"""The lock on a state folder in which something else has replaced the lock file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasuki.config.lock import NODE_LOCK, StateLock, holder, lock_path
from tasuki.wire.errors import InvalidArgument


@pytest.mark.timeout(20)
def test_a_fifo_is_no_lock_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(lock_path(tmp_path, name=NODE_LOCK))
    assert holder(tmp_path, name=NODE_LOCK) is None
    with pytest.raises(InvalidArgument, match=r"state_dir: .*/node\.lock is not a regular file; remove it"):
        StateLock.take(tmp_path, name=NODE_LOCK)
