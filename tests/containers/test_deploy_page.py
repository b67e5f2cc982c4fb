"""Every command of docs/guides/deploy.md as written, in its order, on Docker with a tiny model on a CPU. `make containers`."""

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.models import make_model, save_checkpoint

PAGE = (ROOT / "docs/guides/deploy.md").read_text()
DEPLOY = ROOT / "deploy"
# They never end; a while is enough to see that they print something.
ENDLESS = ("tasuki watch", "tail -F")
ENDLESS_S = 30
# They print nothing, or not always.
SILENT = ("--detach", "node rm", " stop ", "mkdir", "tar --")
# Text that a command must print, beside the exit status 0.
SHOWN = {
    "tasuki doctor": " 0 fail",
    "tasuki plan": "It fits: ",
    "run --rm train": "/runs/first",
    "compose logs --follow train": "has finished",
    "tasuki audit": "clean",
    "compose ps": "(healthy)",
    "GetState": '"phase"',
    "query=tasuki_phase": '"phase":"TRAIN"',
    "/api/node": '"phase"',
}
SETTINGS = {
    'device = "cuda"': 'device = "cpu"',
    "num_steps = 200": "num_steps = 3",
    "prompts_per_step = 32": "prompts_per_step = 4",
    "max_new_tokens = 1024": "max_new_tokens = 8",
}
pytestmark = pytest.mark.timeout(3600)


def commands_of(page: str) -> list[str]:
    """Returns the commands of the page's shell blocks, with continued lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("cd ")]


def answers(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of the commands: folders with a configuration and a model replace the page's."""
    if not answers("docker", "compose", "version") or not answers("docker", "info"):
        pytest.skip("no Docker with Compose answers")
    if not answers("docker", "image", "inspect", os.environ.get("BASE", "")):
        pytest.skip("BASE names no image; sh tests/containers/base.sh makes tasuki-base")
    if answers("docker", "volume", "inspect", "tasuki_state"):
        pytest.skip("there is a node of deploy/compose.yaml on this machine, which the page's commands would remove")
    folder = tmp_path_factory.mktemp("deploy")
    folder.chmod(0o755)
    config, models = folder / "config", folder / "models"
    config.mkdir()
    save_checkpoint(make_model("llama_tied", seed=0), models / "model")
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(10) for b in range(10)]
    (config / "train.jsonl").write_text("".join(rows))
    (config / "eval.jsonl").write_text("".join(rows[:8]))
    (config / "rewards.py").write_text("def reward(*, completion: str) -> float:\n    return float(len(set(completion)))\n")
    node = (DEPLOY / "config" / "node.toml").read_text()
    for ours, tests in SETTINGS.items():
        assert node.count(ours) == 1
        node = node.replace(ours, tests)
    (ports,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    listen, _, tables = ports.partition("\n")
    small = '[rollout]\ncontext_length = 64\nengine.max_total_tokens = 4096\n\n[memory]\nhost_budget_bytes = "600MB"\n'
    (config / "node.toml").write_text(f"{listen}\n{node.replace('[train]', f'{tables}{small}[train]', 1)}")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    files = "compose.yaml:compose.cpu.yaml:compose.tls.yaml"
    path = f"{ROOT / '.tools'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TASUKI_CONFIG": str(config), "TASUKI_MODELS": str(models), "COMPOSE_FILE": files}


def compose(environment: dict[str, str], command: str, *, limit_s: float = 300) -> str:
    """Runs `docker compose COMMAND` and returns its output. Fails the test if it fails."""
    argv = ["docker", "compose", *shlex.split(command)]
    done = subprocess.run(argv, cwd=DEPLOY, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def removed(environment: dict[str, str]) -> Iterator[None]:
    """Removes everything that the page's commands leave behind."""
    yield
    compose(environment, "--profile '*' down --volumes")
    for left in ("lab", "first"):
        shutil.rmtree(Path(DEPLOY, left), ignore_errors=True)


@pytest.mark.usefixtures("removed")
def test_every_command_of_the_page_works(environment: dict[str, str]) -> None:
    for command in commands_of(PAGE):
        is_endless = any(part in command for part in ENDLESS)
        # `docker compose exec` asks for a terminal, which users have.
        typed = f"timeout {ENDLESS_S} {command}" if is_endless else command
        argv = ["script", "--quiet", "--return", "--command", typed, "/dev/null"]
        done = subprocess.run(argv, cwd=DEPLOY, env=environment, capture_output=True, text=True, timeout=1500, check=False)
        assert is_endless or done.returncode == 0, f"{command}\n{done.stdout}"
        assert done.stdout.strip() or any(part in command for part in SILENT), command
        for part, shown in SHOWN.items():
            assert part not in command or shown in done.stdout, f"{command}\n{done.stdout}"


# Kills the supervisor and its guard, with which the node and the container end.
STRIKE = """import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) != os.getpid() and b"tasuki.node" in open(f"/proc/{pid}/cmdline", "rb").read():
        os.kill(int(pid), 9)"""


@pytest.mark.usefixtures("removed")
def test_a_node_that_is_killed_starts_again_and_the_dashboard_shows_it(environment: dict[str, str], tmp_path: Path) -> None:
    compose(environment, "build", limit_s=1500)
    compose(environment, "run --rm certs")
    compose(environment, "--profile dashboard up --detach --wait", limit_s=600)
    for file in ("ca.pem", "viewer.pem", "viewer.key"):
        (tmp_path / file).write_text(compose(environment, f"run --rm -T certs cat /tls/{file}"))
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    context.load_cert_chain(tmp_path / "viewer.pem", tmp_path / "viewer.key")

    def epoch() -> int | None:
        """Returns the epoch of the node as the dashboard sees it; None while there is none."""
        with urllib.request.urlopen("https://localhost:8765/api/node", context=context, timeout=30) as answer:
            seen = json.loads(answer.read())
        return int(seen["node"]["epoch"]) if seen["is_live"] else None

    assert epoch() == 1
    compose(environment, f"exec --detach node python3 -c {shlex.quote(STRIKE)}")
    until = time.monotonic() + 120
    while epoch() != 2:
        assert time.monotonic() < until
        time.sleep(2)


@pytest.mark.usefixtures("removed")
def test_a_container_sees_the_key_of_its_role_alone_and_serves_a_renewed_certificate(environment: dict[str, str]) -> None:
    compose(environment, "build", limit_s=1500)
    compose(environment, "run --rm certs")
    compose(environment, "--profile dashboard --profile prometheus up --detach --wait", limit_s=600)
    for service, role in (("node", "node"), ("dashboard", "node"), ("prometheus", "viewer")):
        files = compose(environment, f"exec -T {service} ls -A /tls").split()
        assert files == ["ca.pem", f"{role}.key", f"{role}.pem"]
    assert compose(environment, "run --rm -T train ls -A /tls") == ""

    # Of the coordinator, the trainer, rollout and the dashboard.
    ports = (50050, 50051, 50052, 8765)

    def served() -> list[str]:
        return [ssl.get_server_certificate(("127.0.0.1", port), timeout=30) for port in ports]

    assert len(set(served())) == 1
    compose(environment, "run --rm certs")
    renewed = compose(environment, "exec -T node cat /tls/node.pem")
    until = time.monotonic() + 60
    while served() != [renewed] * len(ports):
        assert time.monotonic() < until
        time.sleep(1)
    scraped = compose(environment, "exec -T prometheus promtool query instant http://127.0.0.1:9090 up")
    assert "=> 1 @" in scraped
