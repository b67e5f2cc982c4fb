"""The pages of docs/ as a site: mkdocs finds every link and anchor."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

MKDOCS = ROOT / ".site-venv/bin/mkdocs"


@pytest.mark.skipif(not MKDOCS.exists(), reason="mkdocs is not installed: `make site` installs it")
@pytest.mark.long
def test_site_builds_with_every_link_and_anchor(tmp_path: Path) -> None:
    command = [MKDOCS, "build", "--quiet", "--config-file", ROOT / "tools/site/mkdocs.yml", "--site-dir", tmp_path / "site"]
    built = subprocess.run(command, env={"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert 'src="../images/' in (tmp_path / "site/concepts/ring.html").read_text()
