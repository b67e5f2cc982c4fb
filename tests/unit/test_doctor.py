"""`tasuki doctor`: a good node has no failure, and the report shows the facts found."""

from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.wire.extras import install_extras
from tests.unit.doctor import examined


def test_a_good_machine_and_a_good_node_have_no_failure(node_file: Path, capsys: pytest.CaptureFixture[str]):
    # The budget covers tags only, far less than the processes' host memory.
    code, findings = examined(capsys, node_file, ["memory.host_budget_bytes=600MB"])
    assert {name: one for name, one in findings.items() if one["verdict"] == "fail"} == {}
    assert code == 0
    assert {
        "user", "native library", "versions", "open files", "locked memory", "processes", "configuration", "model", "security",
        "memory plan", "/dev/shm", "memory between processes, cpu", "disk of state_dir",
    } <= set(findings)  # fmt: skip
    assert all(one["found"] and (one["advice"] or one["verdict"] == "ok") for one in findings.values())


def test_a_light_install_starts_no_node(node_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasuki.node.start.find_spec", lambda name: None)
    code, findings = examined(capsys, node_file)
    packages = findings["packages of a node"]
    assert (code, packages["verdict"], packages["advice"]) == (1, "fail", install_extras("trainer", "rollout"))
    assert main(["up", str(node_file)]) == 2
    assert capsys.readouterr().err.startswith("tasuki: error NOT_INSTALLED: ")


def test_weights_of_the_hub_are_not_fetched_but_named(
    node_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tasuki.cli.doctor.weights_to_fetch", lambda _: {"model.path": 14_200_000_000})
    _, findings = examined(capsys, node_file)
    assert (findings["model"]["verdict"], findings["memory plan"]["verdict"]) == ("warn", "ok")
    assert "14.20 GB of weights are not here" in findings["model"]["found"]


def test_the_report_is_a_line_for_each_check_and_a_count(capsys: pytest.CaptureFixture[str], node_file: Path):
    run = ["train.dataset=/nonexistent", "train.output_dir=run", "train.reward.function=a", "model.path=/nonexistent"]
    assert main(["doctor", str(node_file), *(part for one in run for part in ("--set", one))]) == 1
    printed = capsys.readouterr().out
    assert "fail  model" in printed and "-> change" in printed and "data of [train]" in printed
    assert printed.splitlines()[-1].endswith("fail") and " ok, " in printed.splitlines()[-1]
