"""Refusals before a node of a fleet, or a run on it, starts: its addresses, its certificate, the run's output folder."""

from pathlib import Path

import pytest

from tasuki.config.load import load_config
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.paths import config_path
from tasuki.config.save import save_config
from tasuki.config.schema import NodeConfig
from tasuki.node.start import check_place, check_run
from tasuki.wire.errors import InvalidArgument

RUN = '[train]\ndataset = "rows.jsonl"\noutput_dir = "run"\n[train.reward]\nfunction = "a:b"\n'
PORTS = ("listen=0.0.0.0:5005",)
SECURITY = ("security.cert=cert.pem", "security.key=cert.key", "security.client_ca=ca.pem")


def node(folder: Path, *overrides: str, rank: int = 1, table: str = RUN) -> NodeConfig:
    file = folder / "node.toml"
    file.write_text(f'state_dir = "state"\n[model]\npath = "model"\n{table}')
    fleet = ("fleet.name=lab", "fleet.num_nodes=2", f"fleet.node_rank={rank}", "fleet.leader=node-a:29400")
    return load_config(file, overrides=[*fleet, *SECURITY, *overrides])


def test_a_node_that_the_leader_cannot_call_is_refused_by_key(tmp_path: Path) -> None:
    check_place(node(tmp_path, *PORTS))
    check_place(node(tmp_path, "fleet.leader=127.0.0.1:29400"))
    for listen, shown in (("unix", "unix"), ("127.0.0.1:5006", "127.0.0.1:5006")):
        with pytest.raises(InvalidArgument, match=f'listen = "{shown}" cannot be called from node 0, at node-a') as refused:
            check_place(node(tmp_path, *PORTS, f"listen={listen}"))
        assert refused.value.metadata["field"] == "listen"


def test_an_interface_that_the_machine_lacks_is_refused_by_key(tmp_path: Path) -> None:
    check_place(node(tmp_path, *PORTS, "fleet.interface=lo"))
    with pytest.raises(InvalidArgument, match='"eth99" has no address on this machine; .*lo.* have one') as refused:
        check_place(node(tmp_path, *PORTS, "fleet.interface=eth99"))
    assert refused.value.metadata["field"] == "fleet.interface"


def test_a_run_is_refused_by_the_folders_of_the_node_that_runs(tmp_path: Path) -> None:
    config = node(tmp_path, *PORTS, rank=0)
    with StateLock.take(config.state_dir, name=NODE_LOCK):
        save_config(config, config_path(config.state_dir))
        check_run(config)
        with pytest.raises(InvalidArgument, match="train.output_dir: "):
            check_run(node(tmp_path, *PORTS, "train.output_dir=elsewhere", rank=0))
