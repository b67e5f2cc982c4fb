"""Findings of `tasuki doctor`, from its checks and from the command as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasuki.cli.doctor import examine
from tasuki.doctor.finding import Finding, Verdict
from tests.conftest import ENVIRONMENT


def is_bad(finding: Finding, verdict: Verdict, *, found: str, advice: str) -> bool:
    return finding.verdict is verdict and found in finding.found and advice in finding.advice


def is_ok(finding: Finding) -> bool:
    return finding.verdict is Verdict.OK and not finding.advice


def finding_of(path: Path, name: str, overrides: Sequence[str]) -> Finding:
    """Runs the checks up to the named one and returns its finding."""
    return next(finding for finding in examine(path, overrides=overrides) if finding.name == name)


def examined(*arguments: str | Path, limits: str = "") -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs the command as a user does; returns the exit code and the findings by name. limits: Python code that the process runs first."""
    program = f"import resource, sys\n{limits}\nfrom tasuki.cli.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", *map(str, arguments), "--json"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)}
