"""`tasuki doctor CONFIG`: each fault of a configuration, its data, its rewards or its certificate is found."""

from __future__ import annotations

import json
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tasuki.cli import certs
from tasuki.cli.__main__ import main
from tasuki.config.load import load_config
from tasuki.doctor.certificates import check_authorities, check_certificate, warn_of_certificate
from tasuki.doctor.finding import Finding, Verdict, ok
from tasuki.doctor.node import check_datasets, check_rewards
from tasuki.wire.extras import install_extras
from tests.dashboard import RECORDED
from tests.unit.doctor import finding_of, is_bad, is_ok


@pytest.mark.parametrize(
    ("overrides", "name", "found"),
    [
        (["trainer.num_rank=2"], "configuration", "trainer.num_rank"),
        (["model.path=/nonexistent"], "model", "PATH_NOT_FOUND"),
        (["rollout.engine.chunked_prefil_size=1"], "engine arguments", "did you mean chunked_prefill_size"),
        (
            ["security.cert=/none", "security.key=/none", "coordinator.listen=127.0.0.1:1", "security.insecure=true"],
            "security",
            "/none",
        ),
        (["state_dir=/dev/null"], "disk of state_dir", "/dev/null is not a folder"),
        (["train.dataset=/none.jsonl", "train.output_dir=out", "train.reward.function=a"], "data of [train]", "/none.jsonl"),
        (["memory.host_budget_bytes=1MB"], "memory plan", "give at least"),
        (
            ["memory.host_budget_bytes=1MB", "rollout.kv_tokens=64"],
            "memory plan",
            "1000000 bytes leave no room for rollout.kv_tokens",
        ),
        (["memory.host_budget_bytes=100TB", "memory.pool=true"], "memory plan", "memory.pool needs"),
    ],
)
def test_a_fault_of_the_configuration_is_found(
    node_file: Path, overrides: list[str], name: str, found: str, capsys: pytest.CaptureFixture[str]
):
    arguments = [part for override in overrides for part in ("--set", override)]
    assert main(["doctor", str(node_file), *arguments, "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings[name]["verdict"] == "fail" and found in findings[name]["found"] and findings[name]["advice"]


def test_data_that_a_run_would_refuse_is_found(node_file: Path):
    shutil.copy(RECORDED / "model" / "tokenizer.json", node_file.parent / "model")
    data = node_file.parent / "train.jsonl"
    data.write_text('{"prompt": "1234>", "answer": "4321"}\n')
    run = [f"train.dataset={data}", "train.output_dir=run", "train.reward.function=a"]

    def judged(*overrides: str) -> Finding:
        (finding,) = check_datasets(load_config(node_file, overrides=[*run, *overrides]), has_model=True)
        return finding

    assert is_ok(judged("train.max_new_tokens=100"))
    too_long = judged("train.max_new_tokens=256")
    assert too_long.verdict is Verdict.FAIL and "leaves no room for a prompt" in too_long.found
    assert too_long.advice == "change train.max_new_tokens"
    data.write_text('{"prompt": "1234>"}\n{}\n')
    assert "train.dataset: " in (refused := judged("train.max_new_tokens=100")).found
    assert "train.jsonl:2: lacks `prompt`" in refused.found and refused.advice == "change train.dataset"
    held_out, missing = node_file.parent / "eval.jsonl", node_file.parent / "none.jsonl"
    data.write_text('{"prompt": "1234>"}\n')
    held_out.write_text("[]\n")
    refused = judged("train.max_new_tokens=100", f"train.eval_dataset={held_out}", "train.eval_every=1")
    assert refused.found.startswith(f"INVALID_ARGUMENT: train.eval_dataset: {held_out}:1: expected an object")
    assert refused.advice == "change train.eval_dataset"
    refused = judged(f"train.eval_dataset={missing}", "train.eval_every=1")
    assert (refused.found, refused.advice) == (f"{missing} is not a file", "change train.eval_dataset")


@pytest.mark.parametrize(
    ("function", "problem"),
    [("nope:fn", "No module named 'nope'"), ("reward:nofn", "no attribute 'nofn'"), ("reward", 'expected "module:function"')],
)
def test_a_reward_that_a_run_would_refuse_is_found(node_file: Path, function: str, problem: str):
    (node_file.parent / "reward.py").write_text("def score(completion):\n    return 0.0\n")
    run = [f"train.dataset={node_file}", "train.output_dir=run"]
    train = load_config(node_file, overrides=[*run, f"train.reward.function={function}"]).train
    assert train is not None
    refused = check_rewards(train, (node_file.parent,))
    assert is_bad(
        refused, Verdict.FAIL, found="INVALID_ARGUMENT: train.reward.function: ", advice="change train.reward.function"
    )
    assert problem in refused.found


def test_one_of_several_rewards_is_named(node_file: Path):
    run = ["train.dataset=/none", "train.output_dir=run", "train.reward.functions.exact.function=a"]
    refused = finding_of(node_file, "reward of [train]", run)
    assert is_bad(refused, Verdict.FAIL, found="got 'a'", advice="change train.reward.functions")


def test_rewards_are_searched_beside_the_configuration(node_file: Path):
    (node_file.parent / "beside_config.py").write_text("def score(completion):\n    return 0.0\n")
    run = ["train.dataset=/none", "train.output_dir=run", "train.reward.functions.exact.function=beside_config:score"]
    assert finding_of(node_file, "reward of [train]", run) == ok("reward of [train]", "beside_config:score")


def test_a_folder_of_something_else_is_found(node_file: Path):
    found = finding_of(node_file, "state_dir", [f"state_dir={node_file.parent}"])
    assert is_bad(found, Verdict.FAIL, found="contains files of something else", advice="change state_dir")


@pytest.mark.parametrize(
    ("file", "override", "advice"),
    [
        ("missing.toml", [], "give the path of a node's TOML file"),
        ("", [], "give the path of a node's TOML file"),
        ("eval.jsonl", [], "correct the TOML of the file"),
        ("node.toml", ["state_dir"], "give --set A.B=VALUE"),
        ("node.toml", ["model=1"], "see docs/config.md for model"),
    ],
)
def test_the_advice_for_a_configuration_names_no_path_as_a_key(node_file: Path, file: str, override: list[str], advice: str):
    (node_file.parent / "eval.jsonl").write_text("{}\n")
    assert is_bad(finding_of(node_file.parent / file, "configuration", override), Verdict.FAIL, found="", advice=advice)


def test_a_certificate_that_ends_is_found(node_file: Path, capsys: pytest.CaptureFixture[str]):
    folder = node_file.parent / "lab"
    assert certs.run(folder, hosts=["node-a"], days=90) == 0
    pair = folder / "node.pem", folder / "node.key"
    found = check_certificate(*pair)
    assert is_ok(found) and "for node-a, localhost, 127.0.0.1, ::1" in found.found
    assert is_bad(check_certificate(*pair, now=time.time() + 80 * 86400), Verdict.WARN, found="until 20", advice="tasuki certs")
    of_node = [f"security.{key}={path}" for key, path in zip(("cert", "key"), pair, strict=True)]
    warn_of_certificate(load_config(node_file, overrides=of_node))
    assert capsys.readouterr().err == ""
    assert certs.run(folder, hosts=["node-a"], days=9) == 0
    warn_of_certificate(load_config(node_file, overrides=of_node))
    warn_of_certificate(load_config(node_file))
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("tasuki: warn certificate: until 20") and "a running node reloads it" in told
    viewers = check_certificate(folder / "viewer.pem", folder / "viewer.key")
    assert is_bad(viewers, Verdict.FAIL, found="unsuitable certificate purpose", advice="new server certificate")
    over = datetime.now(UTC) - timedelta(minutes=1)
    certs.write_pair(folder, "node", *certs.issue(certs.read_authority(folder), "node", hosts=["node-a"], until=over))
    capsys.readouterr()
    security = [f"security.cert={pair[0]}", f"security.key={pair[1]}", f"security.client_ca={folder}/ca.pem"]
    overrides = ["coordinator.listen=0.0.0.0:1", *security]
    assert main(["doctor", str(node_file), *(part for one in overrides for part in ("--set", one)), "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert (findings["security"]["verdict"], findings["certificate"]["verdict"]) == ("ok", "fail")
    assert "certificate has expired" in findings["certificate"]["found"] and findings["certificate"]["advice"]


def test_an_authority_that_ends_is_found(node_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, ends = node_file.parent / "lab", time.time() + 3650 * 86400
    assert certs.run(folder, hosts=["node-a"], days=90) == 0
    authority = folder / "ca.pem"
    assert is_ok(check_authorities(authority))
    assert is_bad(check_authorities(authority, now=ends - 10 * 86400), Verdict.WARN, found="until 20", advice="client_ca")
    assert is_bad(check_authorities(authority, now=ends + 60), Verdict.FAIL, found="1 of 1 expired", advice="client_ca")
    over = certs.make_authority(until=datetime.now(UTC) - timedelta(minutes=1)).cert.public_bytes(serialization.Encoding.PEM)
    authority.write_bytes(authority.read_bytes() + over)
    keys = {"cert": "node.pem", "key": "node.key", "client_ca": "ca.pem"}
    overrides = ["coordinator.listen=0.0.0.0:1", *(f"security.{key}={folder}/{name}" for key, name in keys.items())]
    capsys.readouterr()
    warn_of_certificate(load_config(node_file, overrides=overrides))
    assert f"warn callers' authority: {authority}: 1 of 2 expired" in capsys.readouterr().err
    main(["doctor", str(node_file), *(part for one in overrides for part in ("--set", one)), "--json"])
    findings = {finding["name"]: finding["verdict"] for finding in json.loads(capsys.readouterr().out)}
    assert (findings["certificate"], findings["callers' authority"]) == ("ok", "warn")


def test_a_tracker_that_is_not_installed_is_found(
    node_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tasuki.trackers.adapters.find_spec", lambda name: None)
    assert main(["doctor", str(node_file), "--set", 'track.to=["wandb"]', "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert install_extras("wandb") in findings["trackers"]["found"]
