"""The store in which the ranks of a fleet's nodes meet: over mTLS, by role, and under torch's process groups."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tasuki.trainer.other_nodes import END_KEY
from tasuki.trainer.rank_store import FleetStore, join_ranks
from tasuki.wire.errors import DeadlineExceeded, PermissionDenied, StaleEpoch, TasukiError
from tests.integration.fleet_port import FleetPort, fleet_port
from tests.integration.port_node import certificate


@pytest.fixture
def port(tmp_path: Path) -> Iterator[FleetPort]:
    with fleet_port(tmp_path, num_nodes=2) as served:
        yield served


def join(port: FleetPort, node_rank: int, *, role: str = "node", **changed: Any) -> FleetStore:
    settings: dict[str, Any] = {"num_ranks": 1, "launch_id": f"first-{node_rank}", "recipe": "same", "timeout_s": 10.0}
    fleet = port.fleet(node_rank, attempt=changed.pop("attempt", 0))
    return join_ranks(fleet, certificate(port.certs, role), **(settings | changed))


def all_join(port: FleetPort, **changed: Any) -> list[FleetStore]:
    return at_once(*(lambda rank=rank: join(port, rank, **changed) for rank in range(port.num_nodes)))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def refusal(call: Callable[[], Any]) -> TasukiError:
    with pytest.raises(TasukiError) as raised:
        call()
    return raised.value


def test_store_keeps_what_torch_asks_of_it(port: FleetPort) -> None:
    one, other = all_join(port)
    one.set("a", b"\0\xff")
    assert other.get("a") == b"\0\xff"
    assert (one.add("n", 2), other.add("n", 3), other.num_keys()) == (2, 5, 2)
    assert other.compare_set("b", b"", b"mine") == b"mine"
    assert one.compare_set("b", b"", b"theirs") == b"mine"
    assert (one.check(["a", "b"]), one.delete_key("a"), one.delete_key("a"), one.check(["a", "b"])) == (
        True,
        True,
        False,
        False,
    )
    prefixed = dist.PrefixStore("below", one)
    prefixed.set("key", "text")
    assert other.get("below/key") == b"text"


def test_wait_ends_with_the_key_or_names_it(port: FleetPort) -> None:
    one, other = all_join(port)
    threading.Timer(0.2, lambda: other.set("late", b"")).start()
    one.wait(["late"], timedelta(seconds=5))
    error = refusal(lambda: one.wait(["never"], timedelta(seconds=0.2)))
    assert isinstance(error, DeadlineExceeded)
    assert "never" in error.message


def test_who_waits_for_the_end_hears_of_a_trainer_that_was_started_again(port: FleetPort) -> None:
    one, _ = all_join(port)
    assert isinstance(refusal(lambda: one.wait([END_KEY], timedelta(seconds=0.2))), DeadlineExceeded)
    assert refusal(lambda: one.set(END_KEY, b"")).metadata["field"] == "key"
    waiting = threading.Timer(0.3, lambda: refusal(lambda: join(port, 1, launch_id="second-1", timeout_s=2.0)))
    waiting.start()
    assert isinstance(refusal(lambda: one.wait([END_KEY], timedelta(seconds=10))), StaleEpoch)
    waiting.join()


def test_only_peers_reach_the_store(port: FleetPort) -> None:
    assert isinstance(refusal(lambda: join(port, 0, role="operator")), PermissionDenied)


def test_nodes_that_differ_are_refused_by_name(port: FleetPort) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join, port, 0, timeout_s=6.0)
        time.sleep(0.5)
        assert refusal(lambda: join(port, 1, num_ranks=2)).metadata["field"] == "num_ranks"
        assert refusal(lambda: join(port, 1, recipe="another")).metadata["field"] == "recipe"
        assert isinstance(refusal(lambda: join(port, 1, attempt=1)), StaleEpoch)
        assert isinstance(waiting.exception(), DeadlineExceeded)
        assert "[1]" in str(waiting.exception())


def test_a_node_that_starts_again_ends_the_store_and_waits_for_all(port: FleetPort) -> None:
    one, other = all_join(port)
    one.set("old", b"")
    with ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(other.wait, ["never"], timedelta(seconds=20))
        time.sleep(0.2)
        again = pool.submit(join, port, 0, launch_id="second-0")
        assert isinstance(stuck.exception(), StaleEpoch)
        assert isinstance(refusal(lambda: other.set("late", b"")), StaleEpoch)
        fresh = join(port, 1, launch_id="second-1")
        again.result()
    assert not fresh.check(["old"])


def test_torch_groups_meet_in_the_store(port: FleetPort) -> None:
    groups: list[dist.ProcessGroupGloo] = []  # gloo may abort the process if a group ends before its peer has finished

    def work(store: FleetStore, rank: int) -> list[float]:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=20)
        group = dist.ProcessGroupGloo(dist.PrefixStore("replicate/0", store), rank, 2, options)
        groups.append(group)
        tensor = torch.full((3,), float(rank + 1))
        group.allreduce([tensor]).wait()
        return tensor.tolist()

    one, other = all_join(port)
    assert at_once(lambda: work(one, 0), lambda: work(other, 1)) == [[3.0] * 3] * 2
