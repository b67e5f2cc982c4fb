"""Errors of stages that lack room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.coordinator.headroom import Shortage, refusal
from tasuki.wire.stages import MemoryTag, Stage
from tests.unit.sized_services import GB


def test_message_about_many_devices_stays_short() -> None:
    config = NodeConfig(state_dir=Path("/s"), device="cuda", model=ModelConfig(path=Path("/m")))
    room = Shortage("cuda:0", 9 * GB, 2 * GB, 0, {"others": 3 * GB})
    rooms = [replace(room, device=f"cuda:{index}", needed_bytes=(9 + index) * GB) for index in range(16)]
    error = refusal(Stage.RESUME_KV, rooms, tags=[MemoryTag.KV_CACHE], config=config)
    assert error.metadata["device"] == "cuda:15"
    assert "12 more devices" in error.message
    assert len(error.message) < 1000
