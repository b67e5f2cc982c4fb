"""`make demo KILL=...`: a process that is not there is refused, since killing nobody would prove nothing."""

from __future__ import annotations

import pytest

from client.examples.demo.run import CONFIG, check_ranks, failpoint_of
from tasuki.config.load import load_config
from tasuki.wire.errors import InvalidArgument


@pytest.mark.parametrize("process", ["trainer0", "trainer1", "scheduler0", "trainer", "rollout", "coordinator"])
def test_processes_of_the_node_may_be_killed(process: str) -> None:
    check_ranks(failpoint_of(f"{process}@SYNC"), load_config(CONFIG, overrides=["trainer.num_ranks=2"]))


@pytest.mark.parametrize(
    ("process", "last"), [("trainer2", "trainer1"), ("trainer7", "trainer1"), ("scheduler1", "scheduler0")]
)
def test_a_rank_that_the_node_does_not_have_is_refused(process: str, last: str) -> None:
    config = load_config(CONFIG, overrides=["trainer.num_ranks=2"])
    with pytest.raises(InvalidArgument, match=f"--kill: there is no {process}; the last one of this node is {last}"):
        check_ranks(failpoint_of(f"{process}@SYNC"), config)
