"""`tasuki doctor` on a healthy machine: a good node has no failure, and the report shows the facts found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.wire.extras import install_extras
from tests.unit.doctor import examined


def test_a_good_machine_and_a_good_node_have_no_failure(node_file: Path):
    # The budget covers tags only, far less than the processes' host memory.
    code, findings = examined(node_file, "--set", "memory.host_budget_bytes=600MB", "--set", "memory.pool=true")
    assert {name: one for name, one in findings.items() if one["verdict"] == "fail"} == {}
    assert code == 0
    assert {
        "python", "user", "native library", "versions", "open files", "locked memory", "yama", "processes", "clock", "configuration",
        "model", "security", "memory plan", "/dev/shm", "memory between processes, cpu", "disk of state_dir",
    } <= set(findings)  # fmt: skip
    assert all(one["found"] and (one["advice"] or one["verdict"] == "ok") for one in findings.values())


def test_a_light_install_starts_no_node(node_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for module in ("tasuki.supervisor.installed", "tasuki.config.engine_arguments"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    assert main(["doctor", str(node_file), "--set", "rollout.engine.bogus=1", "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    packages, arguments = findings["packages of a node"], findings["engine arguments"]
    assert (packages["verdict"], packages["advice"]) == ("fail", install_extras("trainer", "rollout"))
    assert (arguments["verdict"], arguments["found"]) == ("warn", "bogus not checked: SGLang is not installed")
    assert main(["up", str(node_file)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("tasuki: error NOT_INSTALLED: a node needs torch, ") and told.endswith(
        install_extras("trainer", "rollout")
    )


def test_the_report_is_a_line_for_each_check_and_a_count(capsys: pytest.CaptureFixture[str], node_file: Path):
    assert main(["doctor", str(node_file), "--set", "model.path=/nonexistent"]) == 1
    printed = capsys.readouterr().out
    assert "fail  model" in printed and "-> change" in printed
    assert printed.splitlines()[-1].endswith("fail") and " ok, " in printed.splitlines()[-1]


def test_the_report_names_tables_in_brackets(capsys: pytest.CaptureFixture[str], node_file: Path):
    run = ["train.dataset=/nonexistent", "train.output_dir=run", "train.reward.function=a"]
    assert main(["doctor", str(node_file), *(part for one in run for part in ("--set", one))]) == 1
    assert "data of [train]" in capsys.readouterr().out
