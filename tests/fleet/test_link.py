"""The fleet service between two network namespaces, with mTLS: nodes join, strangers are refused, and it ends when the link is cut."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasuki.cli import certs
from tasuki.config.load import load_config
from tasuki.config.paths import config_path
from tasuki.config.save import save_config
from tasuki.node.services import EXIT_FLEET_ENDED
from tests.conftest import ENVIRONMENT
from tests.fleet.network import Place, can_make_namespaces, namespaces
from tests.integration.port_node import mtls
from tests.models import make_model, save_checkpoint

pytestmark = [
    pytest.mark.skipif(not can_make_namespaces(), reason="makes network namespaces, which needs root"),
    pytest.mark.timeout(300),
]
TIMEOUT_S = 6.0


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tasuki-"))
    save_checkpoint(make_model("qwen2", seed=0), folder / "model")
    yield folder
    shutil.rmtree(folder)


def _configured(
    folder: Path, rank: int, place: Place, *, authority: Path, attempt: int = 0, listen: str = "", interface: str = ""
) -> Path:
    """Returns the node's state folder, with its configuration in it. listen: a host; by default the place's."""
    file = folder / "node.toml"
    file.write_text(f'state_dir = "x"\n[model]\npath = "{folder}/model"\n')
    state_dir = folder / f"node{rank}"
    listens = [
        f"{service}.listen={listen or place.host}:{7001 + index}"
        for index, service in enumerate(("coordinator", "trainer", "rollout"))
    ]
    fleet = {"name": "lab", "num_nodes": 2, "node_rank": rank, "leader": "10.77.0.1:7000", "attempt": attempt}
    fleet |= {"interface": interface} if interface else {}
    tables = [f"fleet.{key}={value}" for key, value in {**fleet, "node_timeout_s": TIMEOUT_S}.items()]
    overrides = [f"state_dir={state_dir}", "coordinator.stage_timeout_s=5", *listens, *tables, *mtls(authority)]
    config = load_config(file, overrides=overrides)
    state_dir.mkdir(exist_ok=True)
    save_config(config, config_path(state_dir))
    return state_dir


@contextmanager
def _running(place: Place, state_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [*place.prefix, sys.executable, "-m", "tasuki.fleet", "--config", str(config_path(state_dir))]
    with (state_dir / "fleet.log").open("wb") as log:
        process = subprocess.Popen(argv, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _members(state_dir: Path) -> int:
    argv = [sys.executable, "-m", "tasuki.cli", "fleet", "state", "--state-dir", str(state_dir), "--json"]
    told = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return len(json.loads(told.stdout)["fleet"]["members"]) if told.returncode == 0 else 0


def _wait(is_so, *, seconds: float = 90.0) -> None:
    ends = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.2)


def _authority(folder: Path, name: str, *, hosts: Sequence[str] = ("10.77.0.1", "10.77.0.2")) -> Path:
    assert certs.run(folder / name, hosts=list(hosts), days=1, is_fleet=True) == 0
    return folder / name


def test_nodes_join_over_the_link_and_all_end_when_it_is_cut(folder: Path) -> None:
    authority = _authority(folder, "certs")
    with namespaces(2) as places:
        states = [_configured(folder, rank, place, authority=authority) for rank, place in enumerate(places)]
        with _running(places[0], states[0]) as leader, _running(places[1], states[1]) as follower:
            _wait(lambda: _members(states[0]) == 2)
            subprocess.run([*places[1].prefix, "ip", "link", "set", places[1].interface, "down"], check=True)
            assert leader.wait(30) == EXIT_FLEET_ENDED, (states[0] / "fleet.log").read_text()
            assert follower.wait(30) == EXIT_FLEET_ENDED, (states[1] / "fleet.log").read_text()
            assert "node 1 was silent" in (states[0] / "fleet.log").read_text()


def test_a_node_that_listens_everywhere_is_called_by_what_its_certificate_names(folder: Path) -> None:
    authority = _authority(folder, "certs")
    with namespaces(2) as places:
        states = [_configured(folder, rank, place, authority=authority, listen="0.0.0.0") for rank, place in enumerate(places)]
        with _running(places[0], states[0]), _running(places[1], states[1]):
            _wait(lambda: _members(states[0]) == 2)


def test_a_node_whose_certificate_does_not_name_it_is_refused(folder: Path) -> None:
    authority = _authority(folder, "certs", hosts=["10.77.0.1"])
    with namespaces(2) as places:
        states = [_configured(folder, rank, place, authority=authority, listen="0.0.0.0") for rank, place in enumerate(places)]
        with _running(places[0], states[0]), _running(places[1], states[1]) as process:
            assert process.wait(90) == 2
            assert "tasuki certs --host" in (states[1] / "fleet.log").read_text()


@pytest.mark.parametrize(
    ("name", "attempt", "words"), [("other", 0, "does not sign the certificate of the leader"), ("certs", 1, "STALE_EPOCH")]
)
def test_a_foreign_certificate_and_another_attempt_do_not_join(folder: Path, name: str, attempt: int, words: str) -> None:
    authority, other = _authority(folder, "certs"), _authority(folder, "other")
    with namespaces(2) as places:
        lead = _configured(folder, 0, places[0], authority=authority)
        stranger = _configured(folder, 1, places[1], authority={"other": other, "certs": authority}[name], attempt=attempt)
        with _running(places[0], lead), _running(places[1], stranger) as process:
            _wait(lambda: _members(lead) == 1)
            assert process.wait(90) == 2
            assert words in (stranger / "fleet.log").read_text()
            assert _members(lead) == 1


def test_a_node_that_finds_no_leader_asks_for_another_attempt(folder: Path) -> None:
    authority = _authority(folder, "certs")
    with namespaces(2) as places:
        alone = _configured(folder, 1, places[1], authority=authority)
        with _running(places[1], alone) as process:
            assert process.wait(90) == EXIT_FLEET_ENDED
            assert "NOT_JOINED: no leader answered at 10.77.0.1:7000" in (alone / "fleet.log").read_text()
