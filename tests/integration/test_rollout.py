"""The rollout service through real gRPC, on a real engine: its stages, and its state as others see it."""

import os
import re
from pathlib import Path

import psutil
from grpc_health.v1 import health_pb2

from tasuki.v1 import types_pb2, weights_pb2
from tasuki.wire.errors import Asleep, BadHandle, VersionOrder
from tests.integration.rollout_process import RolloutClient, RolloutProcess, TestTrainer
from tests.models import VOCAB_SIZE
from tests.refusal import refused

CONTEXT_LENGTH = 256


WEIGHTS, KV = types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE


async def test_asleep_it_refuses_to_generate_and_names_its_stage(rollout: RolloutClient, rollout_model: Path) -> None:
    assert isinstance(await refused(rollout.generate([[5]])), Asleep)
    state = await rollout.state()
    assert not state.HasField("policy_version")
    assert not state.HasField("received_version")
    assert list(state.resident_tags) == []
    assert (state.tp_size, state.context_length, state.vocab_size) == (1, CONTEXT_LENGTH, VOCAB_SIZE)
    assert (state.model_path, state.is_poisoned, state.num_running) == (str(rollout_model), False, 0)


async def test_the_plan_was_recorded_before_anything_was_published(rollout_process: RolloutProcess) -> None:
    log = rollout_process.log.read_text()
    (found,) = re.finditer(r"event=plan_recorded ranks=1 seconds=[0-9.]+$", log, re.MULTILINE)
    assert "event=stage stage=SYNC" not in log[: found.start()] and "event=plan_not_recorded" not in log


async def test_the_engine_has_answered_before_it_serves(rollout_process: RolloutProcess) -> None:
    log = rollout_process.log.read_text()
    warm, asleep = log.index("event=warmed_up prompt_tokens=1,4,16 new_tokens=6"), log.index("event=asleep")
    assert warm < asleep < log.index("event=started_in")


async def test_a_received_version_is_not_served_before_it_is_committed(rollout: RolloutClient, trainer: TestTrainer) -> None:
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    received = await rollout.receive(trainer.publish(3))
    assert {timing.name for timing in received.timings} == {"import", "record", "copy", "verify", "ranks", "compare"}
    assert (received.policy_version, list(received.fallback_names)) == (3, [])
    assert isinstance(await refused(rollout.generate([[5]])), Asleep)
    state = await rollout.state()
    assert (state.received_version, state.HasField("policy_version"), list(state.resident_tags)) == (3, False, [WEIGHTS])
    await rollout.resume(types_pb2.STAGE_RESUME_KV, KV)
    state = await rollout.state()
    assert (state.policy_version, state.HasField("received_version"), list(state.resident_tags)) == (3, False, [WEIGHTS, KV])


async def test_each_stage_of_waking_can_be_undone(rollout: RolloutClient, trainer: TestTrainer) -> None:
    weights = trainer.publish(3)
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    await rollout.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    await rollout.receive(weights)
    await rollout.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
    assert not (await rollout.state()).HasField("received_version")
    await rollout.wake(weights)
    await rollout.pause(types_pb2.STAGE_PAUSE_KV, KV)
    await rollout.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
    assert isinstance(await refused(rollout.generate([[5]])), Asleep)


async def test_refused_weights_leave_the_engine_as_it_was(rollout: RolloutClient, trainer: TestTrainer) -> None:
    weights = trainer.publish(5)
    await rollout.wake(weights)
    await rollout.sleep()
    await rollout.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    elsewhere = weights_pb2.PublishedWeights.FromString(weights.SerializeToString())
    outside = Path(elsewhere.handles[0].socket_path).parent.parent / "elsewhere.sock"
    outside.symlink_to(elsewhere.handles[0].socket_path)
    elsewhere.handles[0].socket_path = str(outside)
    # `unknown` leaves the front with mappings for boot id "other"; it must still check the handle of `of_no_kind`.
    unknown = weights_pb2.PublishedWeights.FromString(weights.SerializeToString())
    unknown.boot_id, unknown.policy_version = "other", 6
    of_no_kind = weights_pb2.PublishedWeights.FromString(weights.SerializeToString())
    of_no_kind.boot_id, of_no_kind.handles[0].kind = "other", 99
    for bad, kind in (
        (elsewhere, BadHandle),
        (unknown, VersionOrder),
        (of_no_kind, BadHandle),
        (trainer.handles(4), VersionOrder),
    ):
        assert isinstance(await refused(rollout.receive(bad)), kind)
    state = await rollout.state()
    assert (state.is_poisoned, state.stage) == (False, types_pb2.STAGE_RESUME_WEIGHTS)
    assert (await rollout.receive(weights)).policy_version == 5


async def test_health_tells_whether_it_generates(rollout: RolloutClient, rollout_process: RolloutProcess, trainer: TestTrainer):
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert await rollout_process.generate_health() == not_serving
    await rollout.wake(trainer.publish(5))
    assert await rollout_process.generate_health() == serving
    await rollout.drain()
    assert await rollout_process.generate_health() == not_serving


async def test_nothing_lies_outside_the_private_folder(rollout_process: RolloutProcess) -> None:
    folder = rollout_process.socket_dir
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    sockets = [path for path in folder.iterdir() if path.is_socket()]
    assert {oct(path.stat().st_mode & 0o077) for path in sockets} == {"0o0"}
    pids = {
        rollout_process.process.pid,
        *(child.pid for child in psutil.Process(rollout_process.process.pid).children(recursive=True)),
    }
    theirs = [line for line in Path("/proc/net/unix").read_text().splitlines() if "/tmp/" in line and str(folder) not in line]
    opened = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in pids for fd in os.listdir(f"/proc/{pid}/fd")}
    inodes = {f"socket:[{line.split()[6]}]" for line in theirs}
    assert not inodes & opened
