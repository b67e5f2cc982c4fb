"""Before a fleet's node starts: the source of [fleet], addresses, folders; and how the fleet deals prompts and merges states."""

import random
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.__main__ import USER_ERROR, exit_code_of
from tasuki.cli.fleet import DEFAULT_PORT, first_host, fleet_config, fleet_table, up
from tasuki.config.load import load_beside_node, load_config, save_config
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.paths import client_target, config_path, fleet_target, node_targets
from tasuki.config.schema import NodeConfig
from tasuki.fleet.rollout_front import deal_families, deal_prompts, prompt_families
from tasuki.fleet.rules import merged_trainer_state
from tasuki.node.services import EXIT_FLEET_ENDED, EXIT_REFUSED, node_services
from tasuki.node.start import check_place, check_run
from tasuki.v1.trainer_pb2 import GetTrainerStateResponse
from tasuki.wire.errors import DeadlineExceeded, InvalidArgument, NotJoined, PeerUnavailable, TasukiError
from tests.refusal import refusing

ENVIRONMENT = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-a", "TASUKI_FLEET": "first", "TASUKI_ATTEMPT": "3"}


def read(
    folder: Path, *, table: str = "", overrides: tuple[str, ...] = (), environment: dict[str, str] = ENVIRONMENT, **flags: Any
) -> NodeConfig:
    file = folder / "node.toml"
    file.write_text(f'state_dir = "state"\n[model]\npath = "model"\n{table}')
    return fleet_config(file, overrides=overrides, flags=flags, environment=environment)


def test_the_environment_fills_the_table(tmp_path: Path) -> None:
    fleet = read(tmp_path).fleet
    assert fleet is not None
    assert (fleet.name, fleet.num_nodes, fleet.node_rank, fleet.attempt) == ("first", 2, 1, 3)
    assert fleet.leader == "node-a:29400"


def test_flags_come_before_the_file_and_the_file_before_the_environment(tmp_path: Path) -> None:
    table = '[fleet]\nname = "lab"\nnum_nodes = 4\ninterface = "eth0"\n'
    fleet = read(tmp_path, table=table, overrides=("fleet.attempt=9",), node_rank=2, leader=None).fleet
    assert fleet is not None
    assert (fleet.name, fleet.num_nodes, fleet.node_rank, fleet.attempt, fleet.interface) == ("lab", 4, 2, 9, "eth0")


@pytest.mark.parametrize(
    ("environment", "flags", "field", "words"),
    [
        ({}, {}, "fleet.name", "--name"),
        ({**ENVIRONMENT, "NODE_RANK": "2"}, {}, "fleet", "node_rank = 2 needs num_nodes > 2"),
        (ENVIRONMENT, {"leader": "node-a"}, "fleet.leader", "must be HOST:PORT"),
        ({**ENVIRONMENT, "NNODES": "many"}, {}, "NNODES", "must be a whole number"),
        ({**ENVIRONMENT, "TASUKI_FLEET": "a b/../c"}, {}, "fleet.name", "must begin with a letter or a digit"),
    ],
)
def test_what_nobody_tells_and_what_is_wrong_is_named(
    tmp_path: Path, environment: dict[str, str], flags: dict[str, str], field: str, words: str
) -> None:
    with refusing(field, match=words):
        read(tmp_path, environment=environment, **flags)


def test_a_node_of_a_fleet_has_one_more_service_which_ends_it_for_good(tmp_path: Path) -> None:
    config = read(tmp_path)
    services = {service.name: service for service in node_services(config)}
    assert list(services) == ["fleet", "coordinator", "rollout", "trainer"]
    assert set(services["fleet"].final_codes) == {EXIT_REFUSED, EXIT_FLEET_ENDED}
    assert "fleet" not in {service.name for service in node_services(config.model_copy(update={"fleet": None}))}


def test_clients_on_the_machine_call_the_fleet_on_node_0_and_nobody_elsewhere(tmp_path: Path) -> None:
    leader = read(tmp_path, node_rank=0)
    assert client_target(leader) == fleet_target(leader)
    assert client_target(leader.model_copy(update={"fleet": None})) == node_targets(leader)["coordinator"]
    with pytest.raises(InvalidArgument, match="node-a:29400"):
        client_target(read(tmp_path))


def test_commands_beside_a_node_take_its_place_from_how_it_was_started(tmp_path: Path) -> None:
    started = read(tmp_path, table="[fleet]\ninterface = 'eth0'\n", node_rank=0)
    with pytest.raises(InvalidArgument, match=r"fleet\.name"):
        load_beside_node(tmp_path / "node.toml")
    started.state_dir.mkdir()
    save_config(started, config_path(started.state_dir))
    beside = load_beside_node(tmp_path / "node.toml", overrides=["fleet.interface=eth1"]).fleet
    assert beside is not None
    assert started.fleet is not None
    assert beside == started.fleet.model_copy(update={"interface": "eth1"})
    (tmp_path / "alone.toml").write_text(f'state_dir = "{started.state_dir}"\n[model]\npath = "model"\n')
    assert load_beside_node(tmp_path / "alone.toml").fleet is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerUnavailable("trainer: node 0 lost another", service="trainer"), EXIT_FLEET_ENDED),
        (DeadlineExceeded("trainer: nodes 1 have not started", service="trainer"), EXIT_FLEET_ENDED),
        (NotJoined("no leader"), EXIT_FLEET_ENDED),
        (PeerUnavailable("coordinator: gone", service="coordinator"), USER_ERROR),
        (InvalidArgument("trainer.seed", "trainer: is refused", service="trainer"), USER_ERROR),
    ],
)
def test_a_trainer_that_does_not_reach_the_other_nodes_asks_for_another_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: TasukiError, code: int
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("tasuki.cli.fleet.start_node", start)
    assert exit_code_of(lambda: up(read(tmp_path), grace_s=0.0)) == code


RUN = '[train]\ndataset = "rows.jsonl"\noutput_dir = "run"\n[train.reward]\nfunction = "a:b"\n'
PORTS = ("listen=0.0.0.0:5005",)
SECURITY = ("security.cert=cert.pem", "security.key=cert.key", "security.client_ca=ca.pem")


def placed(folder: Path, *overrides: str, rank: int = 1, table: str = RUN) -> NodeConfig:
    file = folder / "node.toml"
    file.write_text(f'state_dir = "state"\n[model]\npath = "model"\n{table}')
    fleet = ("fleet.name=lab", "fleet.num_nodes=2", f"fleet.node_rank={rank}", "fleet.leader=node-a:29400")
    return load_config(file, overrides=[*fleet, *SECURITY, *overrides])


def test_a_node_that_the_leader_cannot_call_is_refused_by_key(tmp_path: Path) -> None:
    check_place(placed(tmp_path, *PORTS))
    check_place(placed(tmp_path, "fleet.leader=127.0.0.1:29400"))
    for listen, shown in (("unix", "unix"), ("127.0.0.1:5006", "127.0.0.1:5006")):
        with refusing("listen", match=f'listen = "{shown}" cannot be called from node 0, at node-a'):
            check_place(placed(tmp_path, *PORTS, f"listen={listen}"))


def test_an_interface_that_the_machine_lacks_is_refused_by_key(tmp_path: Path) -> None:
    check_place(placed(tmp_path, *PORTS, "fleet.interface=lo"))
    with refusing("fleet.interface", match='"eth99" has no address on this machine; .*lo.* have one'):
        check_place(placed(tmp_path, *PORTS, "fleet.interface=eth99"))


def test_a_run_is_refused_by_the_folders_of_the_node_that_runs(tmp_path: Path) -> None:
    config = placed(tmp_path, *PORTS, rank=0)
    with StateLock.take(config.state_dir, name=NODE_LOCK):
        save_config(config, config_path(config.state_dir))
        check_run(config)
        with pytest.raises(InvalidArgument, match="train.output_dir: "):
            check_run(placed(tmp_path, *PORTS, "train.output_dir=elsewhere", rank=0))


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
