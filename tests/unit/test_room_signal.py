"""The signal about room between rollout and trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.memory.room_signal import RoomSignal


def test_the_newest_call_counts(tmp_path: Path) -> None:
    signal, seen = RoomSignal(tmp_path / "room"), RoomSignal(tmp_path / "room")
    for call, expected in (
        (signal.request, (True, False)),
        (signal.offer, (False, True)),
        (signal.request, (True, False)),
        (signal.clear, (False, False)),
    ):
        call()
        assert (seen.is_requested, seen.is_offered) == expected


def test_a_signal_that_cannot_be_written_is_logged_once_and_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    signal = RoomSignal(tmp_path / "missing" / "room")
    for _ in range(3):
        signal.request()
    signal.offer()
    assert not (signal.is_requested or signal.is_offered)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all(line.startswith("event=room_signal_failed error=") for line in told)
    (tmp_path / "missing").mkdir()
    signal.request()
    assert signal.is_requested
