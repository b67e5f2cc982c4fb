"""Sockets of a whole node: none accepts a command or an object from another user of the machine."""

import os
import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import socket_dir
from tests.conftest import RunningNode
from tests.pulses import engine_rank_pids, pids
from tests.sockets import NOBODY, Listener, is_private, listeners, process_tree, torch_stores, who_can_connect

NUM_TRAINER_RANKS, NUM_ENGINE_RANKS = 2, 1


@pytest.fixture(scope="module")
def listening(node: RunningNode) -> list[Listener]:
    pid = holder(node.state_dir, name=NODE_LOCK)
    assert pid is not None
    return listeners(process_tree(pid))


def unix_paths(listening: list[Listener]) -> list[Path]:
    return sorted({Path(listener.address) for listener in listening if listener.kind == "unix"})


def test_every_unix_socket_has_a_name_in_the_private_folder(node: RunningNode, listening: list[Listener]) -> None:
    paths = unix_paths(listening)
    assert {f"{service}.sock" for service in ("coordinator", "trainer", "rollout")} <= {path.name for path in paths}
    for path in paths:
        assert path.is_relative_to(socket_dir(node.state_dir)), f"{path}: abstract, or elsewhere"
        assert is_private(path), path


def test_the_only_ports_are_those_on_which_gloo_waits_for_ranks(node: RunningNode, listening: list[Listener]) -> None:
    others = [listener for listener in listening if listener.kind != "unix"]
    assert {(listener.kind, listener.address.rpartition(":")[0]) for listener in others} == {("tcp", "127.0.0.1")}
    trainers = [pid for rank in range(NUM_TRAINER_RANKS) for pid in pids(node.state_dir, f"trainer{rank}")]
    engines = engine_rank_pids(node.state_dir)
    assert (len(trainers), len(engines)) == (NUM_TRAINER_RANKS, NUM_ENGINE_RANKS)
    assert {listener.pid for listener in others} == {*trainers, *engines}


def test_ports_of_ranks_that_met_take_no_connection(listening: list[Listener]) -> None:
    for port in {listener.port for listener in listening if listener.kind != "unix"}:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.2)


@pytest.mark.long
def test_nothing_answers_to_a_client_of_torchs_store(listening: list[Listener]) -> None:
    ports = {listener.port for listener in listening if listener.kind != "unix"}
    # The same client succeeds where there is a store.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert torch_stores([*ports, store.port]) == [store.port]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_can_connect_to_no_socket_of_the_node(listening: list[Listener]) -> None:
    paths = unix_paths(listening)
    assert len(who_can_connect(paths, uid=0)) == len(paths)
    assert who_can_connect(paths, uid=NOBODY) == []
