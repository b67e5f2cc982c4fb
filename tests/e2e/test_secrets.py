"""Keys and tokens of a whole node do not leak while it is used through its ports: not to processes, files or answers."""

import contextlib
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.client import Client, Credentials, LossConfig, PpoLoss, SamplingParams, TrainingSample
from tasuki.config.load import load_config
from tasuki.config.paths import config_path
from tasuki.wire.errors import PermissionDenied, Unauthenticated
from tests.conftest import API_KEY, RunningNode, tasuki
from tests.dashboard import get, served, token_of
from tests.integration.port_node import write_secret
from tests.limits import wait_for
from tests.sockets import process_tree

pytestmark = pytest.mark.timeout(600)
SERVICES = {"tasuki.coordinator", "tasuki.rollout", "tasuki.trainer", "tasuki.trainer.launch"}
API = ("run", "node", "curves", "memory", "changeovers", "settings", "log", "samples")


@pytest.fixture
def secrets(roomy: RunningNode, lab: Path, tmp_path: Path) -> list[bytes]:
    """Secrets in use: valid tokens and an invalid one, each line of the node's keys, and a key in the caller's environment."""
    wrong = tmp_path / "wrong.token"
    write_secret(wrong, "deadbeef" * 8 + "\n")
    target = load_config(config_path(roomy.state_dir)).port_targets["coordinator"].replace("127.0.0.1", "localhost")

    def at_the_port(token_file: Path) -> Client:
        return Client(target, credentials=Credentials(ca=lab / "ca.pem", token_file=token_file))

    with at_the_port(lab / "trainer.token") as client:
        (sample, *_) = client.generate([[5, 6]], SamplingParams(max_new_tokens=4), num_samples=2)
        learned = TrainingSample.of(sample, prompt_token_ids=[5, 6], advantages=1.0)
        client.forward_backward([learned], LossConfig(loss=PpoLoss()))
        client.discard_gradients()
    with at_the_port(lab / "viewer.token") as client, pytest.raises(PermissionDenied):
        client.generate([[5, 6]], SamplingParams(max_new_tokens=4))
    with at_the_port(wrong) as client, pytest.raises(Unauthenticated):
        client.state()
    lines = [API_KEY.encode()]
    lines += [line for file in (*lab.glob("*.token"), *lab.glob("*.key"), wrong) for line in file.read_bytes().splitlines()]
    return [line for line in lines if not line.startswith(b"-----")]


def told_by_processes(roomy: RunningNode) -> Iterator[tuple[str, bytes]]:
    """Arguments of the command, and arguments and environments of its descendants."""
    yield "up cmdline", Path(f"/proc/{roomy.up.pid}/cmdline").read_bytes()
    for pid in set(process_tree(roomy.up.pid)) - {roomy.up.pid}:
        with contextlib.suppress(OSError):  # it has ended in the meantime
            yield from ((f"{pid} {name}", Path(f"/proc/{pid}/{name}").read_bytes()) for name in ("cmdline", "environ"))


def told_by_files(roomy: RunningNode) -> Iterator[tuple[str, bytes]]:
    """Every file in the node's folder, including logs, journal, configuration, checkpoints, and the output of `up`."""
    for folder, _, names in os.walk(roomy.state_dir.parent):
        for path in (Path(folder, name) for name in names):
            if path.is_file():
                yield str(path), path.read_bytes()


def told_over_http(roomy: RunningNode) -> Iterator[tuple[str, bytes]]:
    """Answers of the metrics address and of the dashboard."""
    config = load_config(config_path(roomy.state_dir))
    with urllib.request.urlopen(f"http://{config.metrics.listen}/metrics", timeout=60) as answer:
        yield "metrics", answer.read()
    with served(None, config=config) as server:
        wait_for(lambda: json.loads(get(server, "/api/node", token=token_of(server))[2])["is_live"])
        for path in API:
            status, _, body = get(server, f"/api/{path}", token=token_of(server))
            assert status == 200, (path, body)
            yield path, body
            assert token_of(server).encode() not in body


def test_no_secret_is_in_an_argument_an_environment_a_file_or_an_answer(roomy: RunningNode, secrets: list[bytes]) -> None:
    told = [*told_by_processes(roomy), *told_by_files(roomy), *told_over_http(roomy)]
    told += [(command, tasuki(command, roomy.config, timeout_s=120).stdout.encode()) for command in ("state", "doctor")]
    arguments = {part.decode() for name, text in told if name.endswith("cmdline") for part in text.split(b"\0")}
    assert arguments >= SERVICES, "the tree is not the whole node's"
    files = {Path(name).name for name, _ in told}
    assert files >= {"node.toml", "journal.sqlite", "coordinator.log", "trainer.log", "rollout.log", "supervisor.log", "up.log"}
    assert {name: secret for name, text in told for secret in secrets if secret in text} == {}
