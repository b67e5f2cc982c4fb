"""A node's rank and peers in its fleet, from a scheduler's environment variables."""

from __future__ import annotations

import pytest

from tasuki.fleet.environment import DEFAULT_PORT, first_host, fleet_table
from tasuki.wire.errors import InvalidArgument


def test_torchruns_variables() -> None:
    environment = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert fleet_table(environment) == {"num_nodes": 4, "node_rank": 2, "leader": "10.0.0.1:1234"}


def test_slurms_variables_name_the_fleet_after_the_job_and_its_restarts() -> None:
    environment = {
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "1",
        "SLURM_RESTART_COUNT": "3",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "gpu-[003-004]",
    }
    assert fleet_table(environment) == {
        "num_nodes": 2,
        "node_rank": 1,
        "attempt": 3,
        "name": "77",
        "leader": f"gpu-003:{DEFAULT_PORT}",
    }


def test_a_job_set_s_variables() -> None:
    environment = {
        "NNODES": "2",
        "JOB_COMPLETION_INDEX": "0",
        "TASUKI_ATTEMPT": "1",
        "JOBSET_NAME": "math",
        "MASTER_ADDR": "math-node-0-0.math",
    }
    assert fleet_table(environment)["leader"] == f"math-node-0-0.math:{DEFAULT_PORT}"
    assert fleet_table(environment)["attempt"] == 1


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu-[003-010,012],login1", "gpu-003"),
        ("rack[1,3]-node,x", "rack1-node"),
        ("a.b.c,d", "a.b.c"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "[1-2]", "gpu-[a]", "gpu-[1"])
def test_what_is_no_list_of_hosts_is_refused(hosts: str) -> None:
    with pytest.raises(InvalidArgument):
        first_host(hosts)
