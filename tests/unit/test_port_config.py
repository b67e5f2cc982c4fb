"""Required settings of a configuration with ports, and the key that a refusal names."""

from pathlib import Path

import pytest

from tasuki.config.load import load_config
from tasuki.config.save import save_config
from tasuki.rpc.port import fleet_port
from tasuki.wire.channel import MAX_PORT_CALLS
from tasuki.wire.errors import InvalidArgument

TLS = ["security.cert=c", "security.key=k"]
TOKEN = "security.callers=t"
ANYWHERE, LOOPBACK = "listen=0.0.0.0:5000", "listen=127.0.0.1:5001"


def load(folder: Path, overrides: list[str]):
    path = folder / "node.toml"
    path.write_text('state_dir = "state"\n[model]\npath = "model"\n')
    return load_config(path, overrides=overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [ANYWHERE, *TLS, "security.client_ca=a"],
        [ANYWHERE, *TLS, "security.client_ca=a", "security.callers=r"],
        [ANYWHERE, *TLS, TOKEN],
        ["listen=node-a.example:5002", *TLS, TOKEN],
        ["listen=[::]:5002", *TLS, TOKEN],
        [LOOPBACK, TOKEN],
        [LOOPBACK, "security.insecure=true"],
        ["listen=[::1]:5001", "security.insecure=true"],
        ["listen=localhost:5001", TOKEN],
        [LOOPBACK, "metrics.listen=127.0.0.1:5004", TOKEN],
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
        ([ANYWHERE], "listen", "is not loopback: set security.cert and security.key"),
        ([ANYWHERE, "security.insecure=true"], "listen", "is not loopback: set security.cert"),
        ([ANYWHERE, *TLS], "listen", "set security.client_ca or security.callers"),
        ([LOOPBACK], "listen", "open to every user of the machine"),
        ([LOOPBACK, TOKEN, "metrics.listen=localhost:5003"], "metrics.listen", "is already taken by listen"),
        (["security.cert=c"], "security.key", "security.cert"),
        (["security.key=c"], "security.cert", "security.key"),
        ([LOOPBACK, TOKEN, "security.insecure=true"], "security.insecure", "remove it"),
        (["listen=::1:5000"], "listen", "must be"),
        (["listen=127.0.0.1:0"], "listen", "must be"),
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
        'state_dir = "s"\n[model]\npath = "m"\n[security]\ncert = "c"\nkey = "k"\ncallers = "v"\n[paths]\nwrite = ["a"]\n'
    )
    config = load_config(path)
    assert (config.security.cert, config.security.callers, config.paths.write) == (
        tmp_path / "c",
        tmp_path / "v",
        (tmp_path / "a",),
    )
    assert config.port_targets == {}


def test_a_fleets_port_has_room_for_the_waits_of_all_its_ranks(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('state_dir = "state"\n[model]\npath = "model"\n')
    fleet = ("fleet.name=lab", "fleet.num_nodes=100", "fleet.node_rank=0", "fleet.leader=127.0.0.1:29400")
    config = load_config(file, overrides=[*fleet, "trainer.num_ranks=8", "rollout.tp_size=8", "security.insecure=true"])
    assert fleet_port(config).max_calls == MAX_PORT_CALLS + 2 * 100 * 8
