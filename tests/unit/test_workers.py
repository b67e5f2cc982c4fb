"""Distribution of the suite's tests over workers."""

from __future__ import annotations

import os

import pytest
import torch

from tests.workers import group_of


def test_files_that_share_a_service_are_of_one_group_and_others_alone() -> None:
    assert group_of("tests/e2e/test_node.py::test_a[b]") == group_of("tests/integration/test_grpcurl.py::test_c")
    assert group_of("tests/unit/test_plan.py::test_a") == "tests/unit/test_plan.py"
    assert group_of("tests/gpu/test_a.py::test_a") == group_of("tests/gpu/test_b.py::test_b")


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="alone, a test may have every core")
def test_workers_share_the_cores() -> None:
    assert torch.get_num_threads() == 1
