"""`tasuki doctor CONFIG`: each fault of a configuration, its data, its rewards or its certificate is found."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasuki.cli import certs
from tasuki.cli.__main__ import main
from tasuki.config.load import load_config
from tasuki.doctor.finding import Finding, Verdict, check_certificate, ok, warn_of_certificate
from tasuki.doctor.node import check_datasets
from tasuki.wire.extras import install_extras
from tests.unit.doctor import examined, finding_of, is_bad, is_ok


@pytest.mark.parametrize(
    ("override", "name", "found"),
    [
        ("trainer.num_rank=2", "configuration", "trainer.num_rank"),
        ("model.path=/nonexistent", "model", "PATH_NOT_FOUND"),
        ("rollout.engine.chunked_prefil_size=1", "configuration", "chunked_prefil_size"),
        ("state_dir=/dev/null", "disk of state_dir", "/dev/null is not a folder"),
        ("memory.host_budget_bytes=1MB", "memory plan", "give at least"),
    ],
)
def test_a_fault_of_the_configuration_is_found(
    node_file: Path, override: str, name: str, found: str, capsys: pytest.CaptureFixture[str]
):
    code, findings = examined(capsys, node_file, [override])
    assert code == 1
    assert findings[name]["verdict"] == "fail" and found in findings[name]["found"] and findings[name]["advice"]


def test_bfloat16_on_a_cpu_that_is_slow_in_it_is_found(node_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasuki.config.load.has_bf16", lambda: False)
    found = finding_of(node_file, "dtypes", ["rollout.dtype=bfloat16"])
    assert is_bad(found, Verdict.WARN, found='rollout.dtype = "bfloat16"', advice="remove")


def test_data_that_a_run_would_refuse_is_found(node_file: Path):
    data = node_file.parent / "train.jsonl"
    data.write_text('{"prompt": "1234>", "answer": "4321"}\n')
    run = [f"train.dataset={data}", "train.output_dir=run", "train.reward.function=a"]

    def judged(*overrides: str) -> Finding:
        return next(iter(check_datasets(load_config(node_file, overrides=[*run, *overrides]), has_model=True)))

    assert is_ok(judged("train.max_new_tokens=100"))
    too_long = judged("train.max_new_tokens=256")
    assert too_long.verdict is Verdict.FAIL and "leaves no room for a prompt" in too_long.found
    assert too_long.advice == "change train.max_new_tokens"
    missing = node_file.parent / "none.jsonl"
    refused = judged(f"train.eval_dataset={missing}", "train.eval_every=1")
    assert (refused.found, refused.advice) == (f"{missing} is not a file", "change train.eval_dataset")


def test_completions_that_would_not_end_are_told(node_file: Path):
    """The model has no stop token."""
    (node_file.parent / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    data = node_file.parent / "train.jsonl"
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    data.write_text(json.dumps({"prompt": "1", "messages": chat}) + "\n")
    rl = [f"train.dataset={data}", "train.output_dir=run", "train.reward.function=a", "train.max_new_tokens=9"]
    assert "there is no stop token" in finding_of(node_file, "completions of [train]", rl).found
    data.write_text(json.dumps({"messages": chat}) + "\n")
    sft = [f"sft.dataset={data}", "sft.output_dir=run", "sft.num_steps=1"]
    assert "1 of 1 rows" in finding_of(node_file, "completions of [sft]", sft).found


def test_tool_calls_that_episodes_could_not_read_are_found(node_file: Path):
    calls = "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}"
    template = "{{ tools }}{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    (node_file.parent / "model" / "chat_template.jinja").write_text(template)
    data = node_file.parent / "train.jsonl"
    rows = [{"prompt": "1"}, {"prompt": [{"role": "user", "content": "1"}], "tools": [{"name": "f"}]}]
    run = [f"train.dataset={data}", "train.output_dir=run", "train.max_new_tokens=9"]
    data.write_text(json.dumps(rows[0]) + "\n")
    told = [
        one.found
        for one in check_datasets(load_config(node_file, overrides=[*run, "train.episode.function=a:b"]), has_model=True)
    ]
    assert "turns with tools will be refused" in told[-1]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = finding_of(node_file, "data of [train]", [*run, "train.episode.function=a:b"])
    assert (
        refused.verdict is Verdict.FAIL
        and "train.jsonl:2: tools: " in refused.found
        and "another form than JSON" in refused.found
    )
    assert is_ok(finding_of(node_file, "data of [train]", [*run, "train.reward.function=a"]))


def test_a_reward_that_a_run_would_refuse_is_found(node_file: Path):
    run = ["train.dataset=/none", "train.output_dir=run", "train.reward.function.exact=a"]
    refused = finding_of(node_file, "reward of [train]", run)
    assert is_bad(refused, Verdict.FAIL, found="got 'a'", advice="change train.reward.function")


def test_rewards_are_searched_beside_the_configuration(node_file: Path):
    (node_file.parent / "beside_config.py").write_text("def score(completion):\n    return 0.0\n")
    run = ["train.dataset=/none", "train.output_dir=run", "train.reward.function.exact=beside_config:score"]
    assert finding_of(node_file, "reward of [train]", run) == ok("reward of [train]", "beside_config:score")


def test_a_folder_of_something_else_is_found(node_file: Path):
    found = finding_of(node_file, "state_dir", [f"state_dir={node_file.parent}"])
    assert is_bad(found, Verdict.FAIL, found="contains files of something else", advice="change state_dir")


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
    security = [f"security.cert={pair[0]}", f"security.key={pair[1]}", f"security.client_ca={folder}/ca.pem"]
    code, findings = examined(capsys, node_file, ["listen=0.0.0.0:1", *security])
    assert code == 1
    assert (findings["security"]["verdict"], findings["certificate"]["verdict"]) == ("ok", "fail")
    assert "certificate has expired" in findings["certificate"]["found"] and findings["certificate"]["advice"]


def test_a_tracker_that_is_not_installed_is_found(node_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasuki.trackers.adapters.find_spec", lambda name: None)
    assert install_extras("wandb") in finding_of(node_file, "trackers", ['track.to=["wandb"]']).found


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
