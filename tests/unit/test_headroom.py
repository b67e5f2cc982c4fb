"""Errors of stages that lack room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.coordinator.headroom import Shortage, after, refusal, taken_by
from tasuki.memory.stages import Stage
from tasuki.memory.tags import MemoryTag, ServiceUsage, TagUsage
from tests.unit.sized_services import GB


def test_message_about_many_devices_stays_short() -> None:
    config = NodeConfig(state_dir=Path("/s"), device="cuda", model=ModelConfig(path=Path("/m")))
    room = Shortage("cuda:0", 9 * GB, 2 * GB, 0, {"others": 3 * GB})
    rooms = [replace(room, device=f"cuda:{index}", needed_bytes=(9 + index) * GB) for index in range(16)]
    error = refusal(Stage.RESUME_KV, rooms, tags=[MemoryTag.KV_CACHE], config=config)
    assert error.metadata["device"] == "cuda:15"
    assert "12 more devices" in error.message
    assert len(error.message) < 1000


def test_what_follows_a_resume_is_not_needed_before_it() -> None:
    def cache(mapped_bytes: int) -> ServiceUsage:
        tag = TagUsage(
            MemoryTag.KV_CACHE, "cuda:0", mapped_bytes, 10 * GB, is_paused=not mapped_bytes, kept_bytes=0, host_copy_bytes=0
        )
        return ServiceUsage((replace(tag, following_bytes=9 * GB),), ())

    assert taken_by(Stage.RESUME_KV, cache(0)) == {"cuda:0": GB}
    # Undo of a drain: memory that has grown is still mapped.
    assert taken_by(Stage.RESUME_KV, cache(4 * GB)) == {}


def test_what_leaves_behind_the_answer_gives_no_room_with_it() -> None:
    awake = TagUsage(MemoryTag.OPTIMIZER, "cuda:0", 4 * GB, 4 * GB, is_paused=False, kept_bytes=0, host_copy_bytes=0)
    trainer = ServiceUsage((replace(awake, leaves_later=True), replace(awake, tag=MemoryTag.GRADIENTS)), ())
    left = after(Stage.OFFLOAD, trainer)
    assert [(one.tag, one.is_leaving, one.is_paused, one.mapped_bytes) for one in left.tags] == [
        ("optimizer", True, True, 4 * GB),
        ("gradients", False, True, 0),
    ]
