"""What the gate writes down of a command is what an audit reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.rpc.command_log import LoggedCommand, read_command_log
from tasuki.rpc.commands import CommandGate
from tasuki.v1 import memory_pb2, trainer_pb2, types_pb2
from tasuki.wire.errors import OutOfGpuMemory, StaleSequence


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A service's log."""
    handler = logging.FileHandler(tmp_path / "trainer.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s service=trainer logger=%(name)s %(message)s"))
    logger = logging.getLogger("tasuki.rpc")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield tmp_path / "trainer.log"
    logger.removeHandler(handler)
    logger.setLevel(level)
    handler.close()


async def test_each_command_has_one_line_with_its_outcome(log: Path) -> None:
    gate = CommandGate()

    async def well() -> memory_pb2.PauseResponse:
        return memory_pb2.PauseResponse()

    async def badly() -> memory_pb2.PauseResponse:
        raise OutOfGpuMemory("no room")

    def offload(sequence: int) -> memory_pb2.PauseRequest:
        command = types_pb2.CommandId(epoch=2, sequence=sequence, request_id=f"c000001-2-{sequence}")
        return memory_pb2.PauseRequest(command=command, stage=types_pb2.STAGE_OFFLOAD)

    for _ in range(3):
        await gate.stage(offload(1), well)
    with pytest.raises(OutOfGpuMemory):
        await gate.stage(offload(4), badly)
    with pytest.raises(StaleSequence):
        await gate.stage(offload(3), well)
    odd = "line\nevent=command name=SYNC epoch=9 'quoted' \u00fc"
    await gate.once(trainer_pb2.OptimStepRequest(command=types_pb2.CommandId(request_id=odd)), well)
    logging.getLogger("tasuki.rpc").info("event=serving service=trainer target=unix:t pid=1")
    await gate.stage(offload(5), well)
    assert read_command_log(log) == [
        [
            LoggedCommand("OFFLOAD", 2, 1, "OK", "'c000001-2-1'"),
            LoggedCommand("OFFLOAD", 2, 4, "GPU_MEMORY", "'c000001-2-4'"),
            LoggedCommand("OptimStep", 0, 0, "OK", ascii(odd)),
        ],
        [LoggedCommand("OFFLOAD", 2, 5, "OK", "'c000001-2-5'")],
    ]


def test_a_service_without_a_log_has_no_commands(tmp_path: Path) -> None:
    assert read_command_log(tmp_path / "missing.log") == [[]]
