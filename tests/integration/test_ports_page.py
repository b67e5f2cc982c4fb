"""docs/ports.md: its configuration loads, its commands work on a node with ports, and its table of roles is that of the methods."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.config.load import load_config
from tasuki.config.ports import port_targets
from tasuki.config.security_schema import CallerRole
from tasuki.rpc.access import read_roles
from tasuki.rpc.methods import METHODS
from tests.conftest import ENVIRONMENT, ROOT
from tests.integration.port_node import PortNode, mtls, port_config, port_node
from tests.integration.test_grpcurl import PATH

PAGE = (ROOT / "docs/ports.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_each_configuration_is_taken(tmp_path: Path) -> None:
    head = 'state_dir = "state"\nmodel.path = "model"\n'
    (ports, with_tokens, roles, table, paths) = blocks("toml")
    listens, _, certificates = ports.partition("[security]")
    (tmp_path / "node.toml").write_text(head + ports)
    assert len(port_targets(load_config(tmp_path / "node.toml"))) == 3
    for text in (f"{listens}{with_tokens}", f"{listens}[security]\n{roles.partition(chr(10))[2]}{certificates}", paths):
        (tmp_path / "node.toml").write_text(head + text)
        load_config(tmp_path / "node.toml")
    (tmp_path / "roles.toml").write_text(table)
    assert read_roles(tmp_path / "roles.toml") == {"spiffe://example.org/alice": CallerRole.OPERATOR, "ci": CallerRole.VIEWER}


@pytest.mark.parametrize("role", CallerRole)
def test_row_of_a_role_has_its_methods_and_no_other(role: CallerRole) -> None:
    (row,) = re.findall(rf"^\| `{role.label}` \| (.*) \|$", PAGE, re.MULTILINE)
    named = set(re.findall(r"`([A-Z]\w+)`", row))
    assert named == {method.method for method in METHODS.values() if method.role is role}


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """Makes a folder with the page's `lab`, as a user does."""
    for line in (line for block in blocks("sh") for line in block.splitlines()):
        command = line.replace("tasuki ", f"{sys.executable} -m tasuki.cli ")
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return tmp_path


async def run_at(node: PortNode, argv: list[str], folder: Path) -> str:
    argv = [part.replace("node-a:50050", node.target) for part in argv]
    environment = {**ENVIRONMENT, "PATH": PATH}
    process = await asyncio.create_subprocess_exec(*argv, cwd=folder, env=environment, stdout=-1, stderr=-2)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_client_of_the_page_works(lab: Path) -> None:
    (program,) = blocks("python")
    async with port_node(port_config(lab, *mtls(lab / "lab")), lab / "lab") as node:
        assert await run_at(node, [sys.executable, "-c", program], lab) == "TRAIN\n"


async def test_grpcurl_of_the_page_works(lab: Path) -> None:
    if shutil.which("grpcurl", path=PATH) is None:
        pytest.skip("grpcurl is not there: `make grpcurl` builds it where go is installed")
    (line,) = [line for block in blocks("text") for line in block.splitlines()]
    header = re.search(r"`(-expand-headers -H .*?)`", PAGE)[1]
    async with port_node(port_config(lab, *mtls(lab / "lab")), lab / "lab") as node:
        assert '"phase": "PHASE_TRAIN"' in await run_at(node, ["bash", "-c", line], lab)
    (lab / "second").mkdir()
    config = port_config(lab / "second", *mtls(lab / "lab")[:2], f"security.tokens.trainer={lab}/lab/trainer.token")
    async with port_node(config, lab / "lab") as node:
        with_token = "export TOKEN=$(cat lab/trainer.token); " + re.sub(r"-cert \S+ -key \S+", lambda _: header, line)
        assert '"phase": "PHASE_TRAIN"' in await run_at(node, ["bash", "-c", with_token], lab)
