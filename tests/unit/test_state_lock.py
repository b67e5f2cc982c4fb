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


def test_a_lock_that_is_a_link_is_refused_and_its_target_keeps_its_content(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    lock_path(tmp_path, name=NODE_LOCK).symlink_to(target)
    with pytest.raises(InvalidArgument, match=r"state_dir: .*/node\.lock is not a regular file; remove it"):
        StateLock.take(tmp_path, name=NODE_LOCK)
    assert target.read_text() == "kept"
