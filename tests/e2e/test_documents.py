"""The Python of README.md and docs/client.md, run unchanged beside the state folder of a running node."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ENVIRONMENT, ROOT, RunningNode


@pytest.mark.parametrize("page", ["README.md", "docs/client.md"])
def test_first_client_program_of_the_page_works(page: str, node: RunningNode) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    program = next(block for block in blocks if block.startswith("from tasuki.client import"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=node.state_dir.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 1
