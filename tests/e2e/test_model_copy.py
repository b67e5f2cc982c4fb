"""A node that reads its model from a copy in shared memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import grpc

from tasuki.config.load import load_config
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import config_path, model_copy_dir, node_targets
from tasuki.node.processes import parent_and_state
from tasuki.v1 import trainer_pb2
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tests.conftest import RunningNode, started_node, tasuki

_LIMIT_S = 180.0


def test_restarted_trainer_reads_the_copy_which_down_removes_after_kills() -> None:
    with started_node(overrides=["model.preload=true"]) as node:
        place = model_copy_dir(node.state_dir)
        assert (place / "model.safetensors").read_bytes() == (node.model / "model.safetensors").read_bytes()
        (node.model / "model.safetensors").unlink()
        trainer = holder(node.state_dir, name="trainer")
        assert trainer
        os.kill(trainer, signal.SIGKILL)
        assert _model_path_of_next_trainer(node, killed=trainer) == str(node.model)
        supervisor = holder(node.state_dir, name=NODE_LOCK)
        assert supervisor
        node.up.send_signal(signal.SIGSTOP)  # as in `tasuki down`
        for pid in (parent_and_state(supervisor)[0], supervisor, node.up.pid):
            os.kill(pid, signal.SIGKILL)
        node.up.wait(_LIMIT_S)
        _wait_until_services_have_ended(node)
        assert place.exists(), "nobody was left to remove it"
        assert tasuki("down", node.config, timeout_s=_LIMIT_S).returncode == 0
        assert _left_of(place) == []


def test_down_removes_the_copy() -> None:
    with started_node(overrides=["model.preload=true"]) as node:
        place = model_copy_dir(node.state_dir)
        assert place.is_dir()
    assert _left_of(place) == []


def _left_of(place: Path) -> list[Path]:
    return list(place.parent.glob(f"{place.name}*"))


def _wait_until_services_have_ended(node: RunningNode) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while any(holder(node.state_dir, name=name) is not None for name in (NODE_LOCK, "coordinator", "trainer", "rollout")):
        assert time.monotonic() < deadline, "a service outlives its supervisor"
        time.sleep(0.1)


def _model_path_of_next_trainer(node: RunningNode, *, killed: int) -> str:
    deadline = time.monotonic() + _LIMIT_S
    while holder(node.state_dir, name="trainer") in (None, killed):
        assert time.monotonic() < deadline, "the trainer was not restarted"
        time.sleep(0.1)
    target = node_targets(load_config(config_path(node.state_dir)))["trainer"]
    with grpc.insecure_channel(target) as channel:
        request = trainer_pb2.GetTrainerStateRequest()
        return TrainerServiceStub(channel).GetTrainerState(request, timeout=_LIMIT_S, wait_for_ready=True).model_path
