"""How the suite's tests are shared among workers."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.workers import _GROUPS, group_of


def test_every_file_with_a_group_is_there() -> None:
    assert [file for file in _GROUPS if not (ROOT / file).is_file()] == []


def test_files_that_share_a_service_are_of_one_group_and_others_alone() -> None:
    assert group_of("tests/e2e/test_node.py::test_a[b]") == group_of("tests/integration/test_grpcurl.py::test_c")
    assert group_of("tests/unit/test_plan.py::test_a") == "tests/unit/test_plan.py"
    assert group_of("tests/gpu/test_a.py::test_a") == group_of("tests/gpu/test_b.py::test_b")
