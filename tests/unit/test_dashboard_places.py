"""Folders that the dashboard accepts, what it shows of their settings, and the address that it prints."""

import socket
from pathlib import Path

import pytest

from tasuki.config.load import config_of, save_config
from tasuki.config.paths import config_path, journal_path
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.coordinator.journal import Journal
from tasuki.dashboard.places import place_of, read_settings
from tasuki.dashboard.server import open_address
from tasuki.runs.folder import archived, name_run
from tasuki.wire.errors import PathNotFound
from tests.integration.port_node import make_certs


def test_a_folder_of_something_else_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "logs").mkdir()
    problem = rf"{tmp_path} belongs to neither a run nor a node: it has none of journal.sqlite, .*metrics.jsonl"
    with pytest.raises(PathNotFound, match=problem) as refused:
        place_of(tmp_path)
    assert refused.value.metadata["path"] == str(tmp_path)


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "summary.json", "state_dir", "samples", "node.toml", "journal.sqlite"]
)
def test_one_file_of_a_run_or_node_is_enough(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / name).touch()
    assert place_of(tmp_path).output_dir == tmp_path


def test_a_run_that_has_ended_is_on_its_node_until_another_begins(tmp_path: Path) -> None:
    state, run = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    Journal(journal_path(state)).close()
    save_config(NodeConfig(state_dir=state, model=ModelConfig(path=tmp_path)), config_path(state))
    name_run(state, run)
    with archived(state, run):
        assert place_of(run).is_on(state)
    place = place_of(run)
    assert place.archive == run and place.config is not None and place.is_on(state)
    name_run(state, tmp_path / "another")
    assert not place_of(run).is_on(state) and place_of(state).is_on(state)


@pytest.mark.parametrize(
    ("host", "address"),
    [("node-a.lab", "node-a.lab:8765"), ("localhost", "localhost:8765"), ("10.1.2.3", "10.1.2.3:8765"), ("fd00::3", "[fd00::3]:8765"),
     (socket.gethostname(), f"{socket.gethostname()}:8765")],
)  # fmt: skip
def test_a_wildcard_address_is_printed_as_one_that_the_certificate_names(tmp_path: Path, host: str, address: str) -> None:
    certs = make_certs(tmp_path / "certs", host=host)
    for listen in ("0.0.0.0:8765", "[::]:8765"):
        assert open_address(listen, cert=certs / "node.pem", key=certs / "node.key") == address
    assert open_address("192.0.2.1:8765", cert=certs / "node.pem", key=certs / "node.key") == "192.0.2.1:8765"


def test_only_what_differs_from_the_defaults_or_has_none_is_listed(tmp_path: Path) -> None:
    run = {
        "dataset": "a.jsonl",
        "output_dir": "run",
        "reward": {"function": {"x": "r:x"}, "weights": {"x": 2.0}},
        "algorithm": "dapo",
    }
    table = {
        "state_dir": "s",
        "model": {"path": "m"},
        "device": "cpu",
        "trainer": {"learning_rate": 1e-3, "eps": 1e-8},
        "train": run,
    }
    found = read_settings(None, config_of(table))
    assert {one["key"]: (one["value"], one["default"] is None) for one in found["changed"] if "/" not in one["value"]} == {
        "device": ("cpu", True),
        "trainer.learning_rate": ("0.001", False),
        "train.reward.function.x": ("r:x", True),
        "train.reward.weights.x": ("2.0", True),
        "train.algorithm": ("dapo", False),
    }
    run["algorithm"] = "grpo"
    assert "train.algorithm" not in {one["key"] for one in read_settings(None, config_of(table))["changed"]}
    assert "warmup_steps = 0" in found["toml"] and found["provenance"] == {}
