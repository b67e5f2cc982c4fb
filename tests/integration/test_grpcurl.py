"""The grpcurl lines of README.md and docs/reference/grpc.md, run unchanged in the state folder of a running node."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, RunningNode

TOOLS = ROOT / ".tools"
PATH = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"


def lines_of(page: str) -> list[str]:
    """Every grpcurl line in the shell blocks of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.startswith("grpcurl ")]


def run_line(line: str, folder: Path) -> None:
    """Runs a line; two blanks and a # at its end may name the code and reason of an expected failure."""
    command, _, expected = line.partition("  # ")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
        timeout=330,
        check=False,
    )
    told = f"{command}\n{done.stdout}{done.stderr}"
    if not expected:
        assert done.returncode == 0, told
        assert done.stdout.strip(), told
        return
    code, _, reason = expected.partition(" ")
    assert done.returncode != 0, told
    assert f"Code: {code}" in done.stderr, told
    assert not reason or f'"reason": "{reason}"' in done.stderr, told


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["README.md", "docs/reference/grpc.md"])
def test_lines_of_the_page_work(page: str, request: pytest.FixtureRequest) -> None:
    if shutil.which("grpcurl", path=PATH) is None:
        pytest.skip("grpcurl is not there: `make grpcurl` builds it where go is installed")
    node: RunningNode = request.getfixturevalue("node")
    lines = lines_of(page)
    assert lines
    for line in lines:
        run_line(line, node.state_dir)
