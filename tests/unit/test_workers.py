"""Distribution of the suite's tests over workers."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT
from tests.extent import _LONG_FILES
from tests.workers import _GROUPS, FilesOverWorkers, group_of, turn


class Worker:
    """A worker of xdist as its scheduler sees it."""

    shutting_down = False

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.given: list[list[int]] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given.append(indices)

    def shutdown(self) -> None:
        self.shutting_down = True


def test_every_file_with_a_group_and_every_long_file_is_there() -> None:
    assert [file for file in (*_GROUPS, *_LONG_FILES) if not (ROOT / file).is_file()] == []


def test_files_that_share_a_service_are_of_one_group_and_others_alone() -> None:
    assert group_of("tests/e2e/test_node.py::test_a[b]") == group_of("tests/integration/test_grpcurl.py::test_c")
    assert group_of("tests/unit/test_plan.py::test_a") == "tests/unit/test_plan.py"
    assert group_of("tests/gpu/test_a.py::test_a") == group_of("tests/gpu/test_b.py::test_b")


def test_a_crashed_worker_leaves_only_what_it_has_not_run(pytestconfig: pytest.Config) -> None:
    option = SimpleNamespace(loadscopereorder=True)
    config = SimpleNamespace(
        option=option, getvalue=lambda name: ["2*popen"], trace=pytestconfig.trace, getoption=pytestconfig.getoption
    )
    scheduler = FilesOverWorkers(config)
    files = [f"tests/unit/test_{letter}.py" for letter in "abcdef"]
    tests = [f"{file}::test_{number}" for file in files for number in range(3)]
    crashing, other, fresh = map(Worker, range(3))
    for worker in (crashing, other):
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    for index in range(4):
        scheduler.mark_test_complete(crashing, crashing.given[index // 3][index % 3])
    assert scheduler.remove_node(crashing) == tests[crashing.given[1][1]]
    scheduler.add_node(fresh)
    scheduler.add_node_collection(fresh, tests)
    scheduler.schedule()
    for worker in (fresh, other):
        for indices in worker.given:
            for index in indices:
                scheduler.mark_test_complete(worker, index)
    assert [] not in fresh.given + other.given
    assert scheduler.tests_finished


def test_the_last_worker_begins_with_unit_tests_and_no_other_has_them_early() -> None:
    groups = ["tests/unit/test_a.py", "tests/integration/test_b.py", "parts", "node"]
    assert min(groups, key=lambda group: turn(group, units_first=True)) == "tests/unit/test_a.py"
    assert sorted(groups, key=lambda group: turn(group, units_first=False)) == groups[::-1]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="alone, a test may have every core")
def test_workers_share_the_cores() -> None:
    assert torch.get_num_threads() == 1
