"""Rules of a fleet: its nodes' states, the distribution of prompts, and its place from a job's environment."""

import random

import pytest

from tasuki.cli.fleet import DEFAULT_PORT, first_host, fleet_table
from tasuki.fleet.rollout_front import deal_families, deal_prompts, prompt_families
from tasuki.fleet.rules import merged_trainer_state
from tasuki.v1.trainer_pb2 import GetTrainerStateResponse
from tasuki.wire.errors import InvalidArgument


def test_the_slowest_node_counts_and_transports_are_named_by_node_where_they_differ() -> None:
    fast, slow, silent = (
        GetTrainerStateResponse(nodes_rate=5e9, nodes_transport="NET/IB"),
        GetTrainerStateResponse(nodes_rate=1e9, nodes_transport="NET/Socket"),
        GetTrainerStateResponse(),
    )
    alike = merged_trainer_state([fast, fast])
    assert (alike.nodes_rate, alike.nodes_transport) == (5e9, "NET/IB")
    unlike = merged_trainer_state([fast, slow])
    assert (unlike.nodes_rate, unlike.nodes_transport) == (1e9, "NET/IB on node 0; NET/Socket on node 1")
    unknown = merged_trainer_state([fast, silent])
    assert not unknown.HasField("nodes_rate")
    assert unknown.nodes_transport == "NET/IB on node 0; unknown on node 1"


def test_prompts_that_continue_one_another_stay_on_one_node() -> None:
    turns = [[1, 2], [5, 6], [1, 2, 3], [5, 6, 7], [1, 2, 3, 4], [9]]
    assert prompt_families(turns) == [[0, 2, 4], [1, 3], [5]]
    assert deal_prompts(turns, num_samples=1, loads=[0, 0]) == [
        [range(1), range(2, 3), range(4, 5)],
        [range(1, 2), range(3, 4), range(5, 6)],
    ]
    assert prompt_families([[1, 2, 3], [1, 2, 4]]) == [[0], [1]], "a common beginning alone joins none"


def test_every_family_is_dealt_once_and_loads_differ_by_a_family_at_most() -> None:
    chosen = random.Random(0)
    for _ in range(300):
        sizes = [chosen.randint(1, 9) for _ in range(chosen.randint(1, 40))]
        loads = [chosen.choice([0, 0, 3, 20]) for _ in range(chosen.randint(1, 6))]
        shares = deal_families(sizes, loads=loads)
        assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
        after = [load + sum(sizes[index] for index in share) for load, share in zip(loads, shares, strict=True)]
        busy = [total for total, share in zip(after, shares, strict=True) if share]
        assert max(busy) - min(after) <= 2 * max(sizes)


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
