"""Traffic between nodes, against the arithmetic for two known models, and the report of `tasuki plan`."""

import json
from pathlib import Path

import pytest

from tasuki.cli.__main__ import USER_ERROR, main
from tasuki.cli.plan import traffic_table
from tasuki.planner.trainer_bytes import node_traffic
from tests.planned import node_with
from tests.unit.test_plan_cli import CONFIG

NODE = node_with(num_ranks=8)

PORTS = [
    part
    for setting in ("listen=0.0.0.0:50050", "security.cert=c", "security.key=k", "security.client_ca=a")
    for part in ("--set", setting)
]


def test_gradients_of_a_7b_model_on_two_nodes_cross_once_in_float32() -> None:
    ours, half = node_traffic(NODE, num_nodes=2)
    num_parameters = NODE.model.num_parameters
    # FSDP2 pads shards to equal size.
    assert ours.num_bytes == pytest.approx(4 * num_parameters, rel=1e-3)
    assert half.num_bytes == pytest.approx(2 * num_parameters, rel=1e-3)
    (row,) = traffic_table([ours], 3200)["node_traffic"]
    assert row["seconds"] == pytest.approx(ours.num_bytes * 8 / 3.2e12)


def test_more_nodes_approach_twice_the_gradients() -> None:
    one, many = (node_traffic(NODE, num_nodes=nodes)[0].num_bytes for nodes in (2, 64))
    assert many == pytest.approx(one * 2 * 63 / 64, rel=1e-6)


def test_a_model_that_one_node_cannot_hold_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "70b+", "--nodes", "4"]) == 1
    assert "more nodes do not make it fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], 'listen = "unix" cannot be called from node 0, at node-0:29400: set it to HOST:PORT'),
        ([*PORTS, "--nodes", "3"], "Crosses nodes, HSDP: "),
        (["--set", "fleet.leader=127.0.0.1:29400"], "Crosses nodes, HSDP: "),
        (["--set", "fleet.num_nodes=0"], "fleet.num_nodes: "),
    ],
)
def test_a_fleet_is_planned_before_a_scheduler_places_it(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "node.toml"
    file.write_text('state_dir = "state"\n[model]\npath = "model"\n[fleet]\nnum_nodes = 2\n')
    main(["plan", str(file), *arguments])
    told = capsys.readouterr()
    assert said in told.out + told.err
    file.write_text('state_dir = "state"\n[model]\npath = "model"\n[fleet]\ninterface = "eth0"\n')
    assert main(["plan", str(file)]) == USER_ERROR
    assert "nodes: [fleet] of CONFIG leaves num_nodes to a scheduler: give --nodes N" in capsys.readouterr().err
