"""Log lines that the gate writes for each command, as an audit reads them."""

import errno
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasuki.coordinator.command_log import LoggedCommand, LoggedLife, read_command_log
from tasuki.rpc.commands import CommandGate
from tasuki.rpc.logs import RateLimitedLog, configure_logging
from tasuki.v1 import memory_pb2, trainer_pb2, types_pb2, weights_pb2
from tasuki.wire.errors import InvalidArgument, OutOfGpuMemory, StaleSequence


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
    gate = CommandGate(boot_id="b1")
    gate.look(2)

    async def well() -> memory_pb2.PauseResponse:
        return memory_pb2.PauseResponse()

    async def badly() -> memory_pb2.PauseResponse:
        raise OutOfGpuMemory("no room")

    async def publish() -> trainer_pb2.PublishWeightsResponse:
        return trainer_pb2.PublishWeightsResponse(weights=weights_pb2.PublishedWeights(policy_version=7))

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
    published = trainer_pb2.PublishWeightsRequest(command=types_pb2.CommandId(epoch=2, sequence=6, request_id="p"))
    await gate.stage(published, publish)
    assert read_command_log(log) == [
        LoggedLife(
            [
                LoggedCommand("OFFLOAD", 2, 1, "OK", "'c000001-2-1'", "b1"),
                LoggedCommand("OFFLOAD", 2, 4, "GPU_MEMORY", "'c000001-2-4'", "b1"),
                LoggedCommand("OptimStep", 0, 0, "OK", ascii(odd), "b1"),
            ]
        ),
        LoggedLife(
            [
                LoggedCommand("OFFLOAD", 2, 5, "OK", "'c000001-2-5'", "b1"),
                LoggedCommand("LOAD_WEIGHTS", 2, 6, "OK", "'p'", "b1", 7),
            ],
            has_beginning=True,
        ),
    ]


def test_a_service_without_a_log_has_no_lives(tmp_path: Path) -> None:
    assert read_command_log(tmp_path / "missing.log") == []


@contextmanager
def logging_to(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Configures logging as a service does, with stderr replaced."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr("sys.stderr", stderr)
    try:
        root.handlers = []
        configure_logging("trainer")
        yield
    finally:
        root.handlers, root.level = handlers, level


FORGED = (
    "2026-01-01 00:00:00,000 INFO service=trainer logger=tasuki.rpc "
    "event=command name=SYNC epoch=9 sequence=1 outcome=OK seconds=1 request_id='r'"
)


@pytest.mark.parametrize("before", ["", "\n", "\r\n", "\x85", "\u2028", "\x1b[2K"])
def test_text_of_a_caller_makes_no_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    stderr, text = io.StringIO(), f"{before}{FORGED}"
    with logging_to(stderr, monkeypatch):
        RateLimitedLog().info("rpc=tasuki.v1.TrainerService/OptimStep message=%s", InvalidArgument("request_id", text).message)
    (line,) = stderr.getvalue().splitlines()
    assert line.isprintable() and "message=request_id: " in line
    (tmp_path / "trainer.log").write_text(stderr.getvalue())
    assert read_command_log(tmp_path / "trainer.log") == []


def test_a_command_behind_a_progress_bar_is_read(tmp_path: Path) -> None:
    (tmp_path / "trainer.log").write_text(f"Loading: 0%|\rLoading: 50%|##  |{FORGED}\n")
    (life,) = read_command_log(tmp_path / "trainer.log")
    assert [command.name for command in life.commands] == ["SYNC"]


def test_refused_calls_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    seconds = [0.0]
    refusals = RateLimitedLog(now=lambda: seconds[0])
    caplog.set_level(logging.INFO, logger="tasuki.rpc")
    for seconds[0] in (0.0, 0.0, 1.0, 1000.0):
        for _ in range(500):
            refusals.info("rpc=%s", "tasuki.v1.CoordinatorService/GetState")
    lines = [record.getMessage() for record in caplog.records]
    left_out = [number for number, line in enumerate(lines) if "event=lines_left_out" in line]
    assert [lines[number] for number in left_out] == [f"event=lines_left_out num={num}" for num in (900, 495)]
    assert (left_out, len(lines)) == ([100, 106], 207)


def test_lines_that_a_full_disk_took_are_told_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk(io.StringIO):
        is_full = False

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    disk = Disk()
    with logging_to(disk, monkeypatch):
        line = "event=command name=SYNC epoch=1 sequence=%d outcome=OK seconds=0.1 boot_id=b version=2 request_id='r'"
        for sequence in (1, 2, 3, 4):
            disk.is_full = sequence in (2, 3)
            logging.getLogger("tasuki.rpc").info(line, sequence)
    (tmp_path / "trainer.log").write_text(disk.getvalue())
    (life,) = read_command_log(tmp_path / "trainer.log")
    assert ([command.sequence for command in life.commands], life.lacks_lines) == ([1, 4], True)
