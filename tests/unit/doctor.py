"""Findings of `tasuki doctor`, from its checks and from the command as a user runs it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.__main__ import main
from tasuki.cli.doctor import examine
from tasuki.doctor.finding import Finding, Verdict


def is_bad(finding: Finding, verdict: Verdict, *, found: str, advice: str) -> bool:
    return finding.verdict is verdict and found in finding.found and advice in finding.advice


def is_ok(finding: Finding) -> bool:
    return finding.verdict is Verdict.OK and not finding.advice


def finding_of(path: Path, name: str, overrides: Sequence[str]) -> Finding:
    """Runs the checks up to the named one and returns its finding."""
    return next(finding for finding in examine(path, overrides=overrides) if finding.name == name)


def examined(
    capsys: pytest.CaptureFixture[str], path: Path, overrides: Sequence[str] = ()
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs the command as a user does; returns the exit code and the findings by name."""
    capsys.readouterr()
    code = main(["doctor", str(path), *(part for one in overrides for part in ("--set", one)), "--json"])
    return code, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
