"""Required settings of a configuration with ports, and the key that a refusal names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.config.load import load_config
from tasuki.config.ports import port_targets
from tasuki.config.save import save_config
from tasuki.rpc.port import fleet_port
from tasuki.wire.channel import MAX_PORT_CALLS
from tasuki.wire.errors import InvalidArgument

TLS = ["security.cert=c", "security.key=k"]
TOKEN = "security.tokens.trainer=t"
ANYWHERE, LOOPBACK = "coordinator.listen=0.0.0.0:5000", "trainer.listen=127.0.0.1:5001"


def load(folder: Path, overrides: list[str]):
    path = folder / "node.toml"
    path.write_text('state_dir = "state"\n[model]\npath = "model"\n')
    return load_config(path, overrides=overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [ANYWHERE, *TLS, "security.client_ca=a"],
        [ANYWHERE, *TLS, "security.client_ca=a", "security.roles=r"],
        [ANYWHERE, *TLS, TOKEN],
        ["rollout.listen=node-a.example:5002", *TLS, TOKEN],
        ["rollout.listen=[::]:5002", *TLS, TOKEN],
        [LOOPBACK, TOKEN],
        [LOOPBACK, "security.insecure=true"],
        ["trainer.listen=[::1]:5001", "security.insecure=true"],
        ["trainer.listen=localhost:5001", TOKEN],
        [LOOPBACK, "rollout.listen=[::1]:5001", TOKEN],
        [*TLS, "security.client_ca=a"],
    ],
)
def test_ports_that_know_their_callers_are_taken(tmp_path: Path, overrides: list[str]) -> None:
    config = load(tmp_path, overrides)
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == config


@pytest.mark.parametrize(
    ("overrides", "field", "text"),
    [
        ([ANYWHERE], "coordinator.listen", "is not loopback: set security.cert and security.key"),
        ([ANYWHERE, TOKEN], "coordinator.listen", "is not loopback: set security.cert and security.key"),
        ([ANYWHERE, "security.insecure=true"], "coordinator.listen", "is not loopback: set security.cert"),
        ([ANYWHERE, *TLS], "coordinator.listen", "set security.client_ca or security.tokens"),
        ([ANYWHERE, *TLS, "security.insecure=true"], "coordinator.listen", "set security.client_ca or security.tokens"),
        ([LOOPBACK], "trainer.listen", "open to every user of the machine"),
        ([LOOPBACK, *TLS], "trainer.listen", "open to every user of the machine"),
        (
            [ANYWHERE, "trainer.listen=0.0.0.0:5000"],
            "trainer.listen",
            '= "0.0.0.0:5000" is already taken by coordinator.listen',
        ),
        ([ANYWHERE, "rollout.listen=127.0.0.1:5000"], "rollout.listen", "is already taken by coordinator.listen"),
        ([LOOPBACK, "metrics.listen=localhost:5001"], "metrics.listen", "is already taken by trainer.listen"),
        (["security.cert=c"], "security.key", "security.cert"),
        (["security.key=c"], "security.cert", "security.key"),
        (["security.client_ca=c"], "security.cert", "security.client_ca"),
        ([*TLS, "security.client_ca=a", TOKEN], "security.tokens", "without security.client_ca"),
        (["security.roles=r"], "security.roles", "security.client_ca"),
        ([LOOPBACK, TOKEN, "security.insecure=true"], "security.insecure", "remove it"),
        (["coordinator.listen=foo"], "coordinator.listen", "must be"),
        (["coordinator.listen=::1:5000"], "coordinator.listen", "must be"),
        (["coordinator.listen=127.0.0.1:0"], "coordinator.listen", "must be"),
        (["coordinator.listen=:5000"], "coordinator.listen", "must be"),
        (["security.tokens.admin=t"], "security.tokens.admin", "unknown key"),
        (["security.token=t"], "security.token", "unknown key"),
    ],
)
def test_ports_that_do_not_are_refused_by_key(tmp_path: Path, overrides: list[str], field: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        load(tmp_path, overrides)
    assert refused.value.metadata["field"] == field
    assert text in refused.value.message


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        'state_dir = "s"\n[model]\npath = "m"\n[security]\ncert = "c"\nkey = "k"\n[security.tokens]\nviewer = "v"\n[paths]\nwrite = ["a"]\n'
    )
    config = load_config(path)
    assert (config.security.cert, config.security.tokens.viewer, config.paths.write) == (
        tmp_path / "c",
        tmp_path / "v",
        (tmp_path / "a",),
    )
    assert port_targets(config) == {}


def test_command_that_would_open_a_port_to_everybody_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "node.toml"
    path.write_text('state_dir = "state"\n[model]\npath = "model"\n[coordinator]\nlisten = "0.0.0.0:5000"\n')
    assert main(["up", str(path)]) == 2
    assert "INVALID_ARGUMENT: coordinator.listen = 0.0.0.0:5000 is not loopback" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_a_fleets_port_has_room_for_the_waits_of_all_its_ranks(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('state_dir = "state"\n[model]\npath = "model"\n')
    fleet = ("fleet.name=lab", "fleet.num_nodes=100", "fleet.node_rank=0", "fleet.leader=127.0.0.1:29400")
    config = load_config(file, overrides=[*fleet, "trainer.num_ranks=8", "rollout.tp_size=8", "security.insecure=true"])
    assert fleet_port(config).max_calls == MAX_PORT_CALLS + 2 * 100 * 8
