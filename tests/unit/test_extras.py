"""Install commands in messages about missing packages work in the environment that lacks them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.wire import extras
from tests.conftest import ENVIRONMENT


def test_an_environment_without_pip_is_given_the_command_of_its_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(extras.PathFinder, "find_spec", lambda name: None)
    told = extras.install_extras("trainer,rollout", "wandb")
    assert told == f"uv pip install --python {tmp_path / '.venv'} '.[trainer,rollout,wandb]' in tasuki's checkout"
    (tmp_path / ".uv" / "bin").mkdir(parents=True)
    (tmp_path / ".uv" / "bin" / "uv").touch()
    told = extras.install_extras("trainer,rollout", "wandb")
    options = "--extra trainer --extra rollout --extra wandb"
    assert told == f".uv/bin/uv sync --locked --inexact {options} in tasuki's checkout"
    monkeypatch.setattr(extras.PathFinder, "find_spec", lambda name: object())
    assert extras.install_extras("wandb") == "pip install '.[wandb]' in tasuki's checkout"


def test_a_message_leaves_setuptools_importable() -> None:
    """The module finder of setuptools takes any lookup of pip as a sign that pip is running."""
    code = "from tasuki.wire.extras import install_extras; install_extras('otel'); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)
