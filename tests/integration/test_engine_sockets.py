"""Sockets of an engine with two ranks: they meet in a file, and accept no pickle on any port."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.rollout_process import RolloutProcess
from tests.sockets import Listener, is_private, listeners, process_tree, torch_stores


@pytest.fixture(scope="module")
def listening(engine_pair: RolloutProcess) -> list[Listener]:
    return listeners(process_tree(engine_pair.process.pid))


def test_unix_sockets_are_in_the_private_folder(engine_pair: RolloutProcess, listening: list[Listener]) -> None:
    paths = [Path(listener.address) for listener in listening if listener.kind == "unix"]
    assert engine_pair.socket_dir / "rollout.sock" in paths
    assert [path for path in paths if not (path.is_relative_to(engine_pair.socket_dir) and is_private(path))] == []


def test_ports_are_gloos_on_loopback_and_no_store_answers(engine_pair: RolloutProcess, listening: list[Listener]) -> None:
    others = [listener for listener in listening if listener.kind != "unix"]
    assert {(listener.kind, listener.address.rpartition(":")[0]) for listener in others} == {("tcp", "127.0.0.1")}
    # The front has none; both ranks have equally many, one per group.
    counts = {pid: sum(listener.pid == pid for listener in others) for pid in {listener.pid for listener in others}}
    assert engine_pair.process.pid not in counts
    assert len(counts) == 2
    assert len(set(counts.values())) == 1
    assert torch_stores([listener.port for listener in others]) == []


def test_the_ranks_have_met_in_a_file_of_the_private_folder(engine_pair: RolloutProcess) -> None:
    stores = list((engine_pair.socket_dir / "tmp").glob("*.store"))
    assert len(stores) == 1
    assert stores[0].stat().st_size > 0
