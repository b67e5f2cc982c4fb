"""deploy/: commands in compose.yaml and copies of the Dockerfile exist, and a role's volume has its key alone. Needs no Docker."""

import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasuki.cli.arguments import make_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
COMMANDS = {
    **{name: SERVICES[name]["command"] for name in ("node", "train")},
    "healthcheck": SERVICES["node"]["healthcheck"]["test"][1:],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_one_that_tasuki_takes(name: str) -> None:
    program, *arguments = COMMANDS[name]
    assert program == "tasuki"
    assert make_parser().parse_args(arguments).config == Path("/config/node.toml")


def test_the_image_s_tag_is_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {SERVICES[name]["image"] for name in ("node", "train", "dashboard")} == {f"tasuki:${{TASUKI_VERSION:-{version}}}"}


def test_every_extra_that_the_image_installs_exists() -> None:
    (words,) = re.findall(r"printf -- '--extra %s ' ([^)]*)\)", (DEPLOY / "Dockerfile").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*words.split()} - {"${EXTRAS}"} <= extras.keys()


def create_certificates(folder: Path) -> dict[str, Path]:
    """Runs the command of `certs` on this machine, with a folder in place of each volume. Returns them by the volume's name."""
    mounts = (text.split(":") for text in SERVICES["certs"]["volumes"])
    folders = {volume: folder / inside.lstrip("/") for volume, inside, *_ in mounts}
    for path in folders.values():
        path.mkdir(parents=True, exist_ok=True)
    command: list[str] = [text.replace("$$", "$") for text in SERVICES["certs"]["command"]]
    command = [re.sub(r"(?<=[\s\"])/(?=tls|roles)", f"{folder}/", text) for text in command]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([*command[:-1], "localhost"], check=True, env={**os.environ, "PATH": path}, capture_output=True, timeout=60)
    return folders


def test_a_volume_has_the_key_of_its_role_alone(tmp_path: Path) -> None:
    folders = create_certificates(tmp_path)
    for role in ("node", "viewer"):
        files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folders[f"tls-{role}"].iterdir()}
        assert files == {"ca.pem": 0o644, f"{role}.pem": 0o644, f"{role}.key": 0o600}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    create_certificates(tmp_path)
    for path, content in before.items():
        assert (path.read_bytes() == content) is (path.stem == "ca"), f"{path} is renewed unless it is the authority's"
