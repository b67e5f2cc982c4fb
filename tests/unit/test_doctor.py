"""`tasuki doctor`: every fault that it knows is put in, and gets its line; a good machine gets none."""

from __future__ import annotations

import json
import pwd
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli import certs
from tasuki.cli.__main__ import main
from tasuki.cli.doctor import host
from tasuki.cli.doctor.certificates import check_certificate, warn_of_certificate
from tasuki.cli.doctor.command import examine
from tasuki.cli.doctor.finding import Finding, Verdict, ok
from tasuki.cli.doctor.gpus import Gpu, GpuFacts, check_compilers, check_driver, check_peers, check_strangers, gpu_findings
from tasuki.cli.doctor.node import check_datasets, check_passing, check_plan, check_rewards
from tasuki.config.load import load_config
from tasuki.wire.extras import install_extras
from tests.conftest import ENVIRONMENT
from tests.dashboard import RECORDED
from tests.tiny_disk import tmpfs
from tests.unit.test_plan_cli import CONFIG

GB = 10**9


def is_bad(finding: Finding, verdict: Verdict, *, found: str, advice: str) -> bool:
    return finding.verdict is verdict and found in finding.found and advice in finding.advice


def is_ok(finding: Finding) -> bool:
    return finding.verdict is Verdict.OK and not finding.advice


def finding_of(path: Path, name: str, overrides: Sequence[str]) -> Finding:
    """One finding of the command, without the checks behind it."""
    return next(finding for finding in examine(path, overrides=overrides) if finding.name == name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a node that would start on a CPU, but for what its model folder has no weights for."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    file = tmp_path / "node.toml"
    file.write_text(f'state_dir = "{tmp_path}/node"\n[model]\npath = "model"\n')
    return file


def examined(*arguments: str | Path, limits: str = "") -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and findings by name of the command as a user runs it. limits: Python that runs in its process first."""
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


def test_a_good_machine_and_a_good_node_have_no_failure(config: Path):
    # A budget is for tags, and much less than the host memory of the processes.
    code, findings = examined(config, "--set", "memory.host_budget_bytes=600MB", "--set", "memory.pool=true")
    assert {name: one for name, one in findings.items() if one["verdict"] == "fail"} == {}
    assert code == 0
    assert {
        "python", "user", "native library", "versions", "open files", "locked memory", "yama", "processes", "clock", "configuration",
        "model", "security", "memory plan", "/dev/shm", "memory between processes, cpu", "disk of state_dir",
    } <= set(findings)  # fmt: skip
    assert all(one["found"] and (one["advice"] or one["verdict"] == "ok") for one in findings.values())


@pytest.mark.parametrize(
    ("limit", "value", "name"),
    [
        ("RLIMIT_NOFILE", 512, "open files"),
        ("RLIMIT_MEMLOCK", 0, "locked memory"),
        ("RLIMIT_FSIZE", 1 << 20, "memory between processes, cpu"),
    ],
)
def test_a_limit_of_the_process_is_found(limit: str, value: int, name: str):
    code, findings = examined(limits=f"resource.setrlimit(resource.{limit}, ({value}, {value}))")
    assert findings[name]["verdict"] == "fail" and findings[name]["advice"]
    assert code == 1


def test_faults_of_the_machine_are_found(tmp_path: Path):
    assert is_bad(host.check_python((3, 10)), Verdict.FAIL, found="3.10", advice="3.11")
    assert is_bad(host.check_user(lambda: pwd.getpwuid(2**31 - 5)[0]), Verdict.FAIL, found="has no name", advice="export USER")
    for paths in ({"path": tmp_path / "no.so"}, {"preloaded": tmp_path / "no.so"}):
        assert is_bad(host.check_native_library(**paths), Verdict.FAIL, found="no.so is missing", advice="make native")
    (tmp_path / "scope").write_text("2\n")
    assert is_bad(host.check_yama(tmp_path / "scope"), Verdict.WARN, found="ptrace_scope 2", advice="stacks")
    assert is_ok(host.check_yama(tmp_path / "none"))
    assert is_bad(host.check_processes(tmp_path), Verdict.FAIL, found="hides other processes", advice="hidepid")
    assert is_bad(host.check_clock(0.0), Verdict.FAIL, found="1970", advice="set the clock")
    assert is_bad(host.check_open_files(4096), Verdict.WARN, found="4096", advice="65536")
    assert is_ok(host.check_open_files(resource.RLIM_INFINITY))


def test_other_versions_than_the_locks_are_found(tmp_path: Path):
    lock = tmp_path / "uv.lock"
    lock.write_text('[[package]]\nname = "torch"\nversion = "2.11.0"\n[[package]]\nname = "sglang"\nversion = "0.5.15.post1"\n')
    locked = host.locked_versions(lock)
    assert is_ok(host.check_versions({"torch": "2.11.0+cu130", "sglang": "0.5.15.post1"}, locked))
    found = host.check_versions({"torch": "2.12.0", "sglang": "0.5.15.post1"}, locked)
    assert is_bad(found, Verdict.WARN, found="torch 2.12.0 (lock: 2.11.0)", advice="make setup")
    assert is_bad(
        host.check_versions({"torch": "2.11.0"}, locked),
        Verdict.WARN,
        found="sglang not",
        advice=install_extras("trainer", "rollout"),
    )
    assert host.locked_versions(tmp_path / "none") == {}


def test_small_shared_memory_is_found(tmp_path: Path):
    with tmpfs(tmp_path / "shm", num_kib=1024) as disk:
        found = host.check_shared_memory(disk.folder)
        assert is_bad(found, Verdict.FAIL, found="MiB free", advice="--shm-size")
    with tmpfs(tmp_path / "shm64", num_kib=64 * 1024) as disk:
        assert is_ok(host.check_shared_memory(disk.folder))
        assert is_bad(host.check_shared_memory(disk.folder, num_ranks=2), Verdict.WARN, found="MiB free", advice="NCCL")
    assert host.check_shared_memory(tmp_path / "none").verdict is Verdict.FAIL


def test_a_disk_without_room_is_found(tmp_path: Path):
    with tmpfs(tmp_path / "disk", num_kib=1024) as disk:
        found = host.check_disk("state_dir", disk.folder / "new" / "node", needed_bytes=0)
        assert is_bad(found, Verdict.FAIL, found=f"at {disk.folder}", advice="choose another state_dir")
    found = host.check_disk("train.output_dir", tmp_path, needed_bytes=10**18)
    assert is_bad(found, Verdict.WARN, found="1000000000.0 GB wanted", advice="free space")


def test_a_port_that_is_taken_is_found(config: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert host.check_port("metrics.listen", "127.0.0.1", port).verdict is Verdict.FAIL
        code, findings = examined(config, "--set", f"metrics.listen=127.0.0.1:{port}")
        assert code == 1 and findings["port of metrics.listen"]["verdict"] == "fail"
    assert is_ok(host.check_port("metrics.listen", "127.0.0.1", port))


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
    config: Path, overrides: list[str], name: str, found: str, capsys: pytest.CaptureFixture[str]
):
    arguments = [part for override in overrides for part in ("--set", override)]
    assert main(["doctor", str(config), *arguments, "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings[name]["verdict"] == "fail" and found in findings[name]["found"] and findings[name]["advice"]


def test_data_that_a_run_would_refuse_is_found(config: Path):
    shutil.copy(RECORDED / "model" / "tokenizer.json", config.parent / "model")
    data = config.parent / "train.jsonl"
    data.write_text('{"prompt": "1234>", "answer": "4321"}\n')
    run = [f"train.dataset={data}", "train.output_dir=run", "train.reward.function=a"]

    def judged(*overrides: str) -> Finding:
        (finding,) = check_datasets(load_config(config, overrides=[*run, *overrides]), has_model=True)
        return finding

    assert is_ok(judged("train.max_new_tokens=100"))
    too_long = judged("train.max_new_tokens=256")
    assert too_long.verdict is Verdict.FAIL and "leaves no room for a prompt" in too_long.found
    assert too_long.advice == "change train.max_new_tokens"
    data.write_text('{"prompt": "1234>"}\n{}\n')
    assert "train.dataset: " in (refused := judged("train.max_new_tokens=100")).found
    assert "train.jsonl:2: lacks `prompt`" in refused.found and refused.advice == "change train.dataset"
    held_out, missing = config.parent / "eval.jsonl", config.parent / "none.jsonl"
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
def test_a_reward_that_a_run_would_refuse_is_found(config: Path, function: str, problem: str):
    (config.parent / "reward.py").write_text("def score(completion):\n    return 0.0\n")
    run = [f"train.dataset={config}", "train.output_dir=run"]
    train = load_config(config, overrides=[*run, f"train.reward.function={function}"]).train
    assert train is not None
    refused = check_rewards(train, (config.parent,))
    assert is_bad(
        refused, Verdict.FAIL, found="INVALID_ARGUMENT: train.reward.function: ", advice="change train.reward.function"
    )
    assert problem in refused.found


def test_one_of_several_rewards_is_named(config: Path):
    run = ["train.dataset=/none", "train.output_dir=run", "train.reward.functions.exact.function=a"]
    refused = finding_of(config, "reward of [train]", run)
    assert is_bad(refused, Verdict.FAIL, found="got 'a'", advice="change train.reward.functions")


def test_rewards_are_searched_beside_the_configuration(config: Path):
    (config.parent / "beside_config.py").write_text("def score(completion):\n    return 0.0\n")
    run = ["train.dataset=/none", "train.output_dir=run", "train.reward.functions.exact.function=beside_config:score"]
    assert finding_of(config, "reward of [train]", run) == ok("reward of [train]", "beside_config:score")


def test_a_light_install_starts_no_node(config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for module in ("tasuki.supervisor.installed", "tasuki.config.engine_arguments"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    assert main(["doctor", str(config), "--set", "rollout.engine.bogus=1", "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    packages, arguments = findings["packages of a node"], findings["engine arguments"]
    assert (packages["verdict"], packages["advice"]) == ("fail", install_extras("trainer", "rollout"))
    assert (arguments["verdict"], arguments["found"]) == ("warn", "bogus not checked: SGLang is not installed")
    assert main(["up", str(config)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("tasuki: error NOT_INSTALLED: a node needs torch, ") and told.endswith(
        install_extras("trainer", "rollout")
    )


def test_a_folder_of_something_else_is_found(config: Path):
    found = finding_of(config, "state_dir", [f"state_dir={config.parent}"])
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
def test_the_advice_for_a_configuration_names_no_path_as_a_key(config: Path, file: str, override: list[str], advice: str):
    (config.parent / "eval.jsonl").write_text("{}\n")
    assert is_bad(finding_of(config.parent / file, "configuration", override), Verdict.FAIL, found="", advice=advice)


def test_a_certificate_that_ends_is_found(config: Path, capsys: pytest.CaptureFixture[str]):
    folder = config.parent / "lab"
    assert certs.run(folder, hosts=["node-a"], days=90) == 0
    pair = folder / "node.pem", folder / "node.key"
    found = check_certificate(*pair)
    assert is_ok(found) and "for node-a, localhost, 127.0.0.1" in found.found
    assert is_bad(check_certificate(*pair, now=time.time() + 80 * 86400), Verdict.WARN, found="until 20", advice="tasuki certs")
    of_node = [f"security.{key}={path}" for key, path in zip(("cert", "key"), pair, strict=True)]
    warn_of_certificate(load_config(config, overrides=of_node))
    assert capsys.readouterr().err == ""
    assert certs.run(folder, hosts=["node-a"], days=9) == 0
    warn_of_certificate(load_config(config, overrides=of_node))
    warn_of_certificate(load_config(config))
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("tasuki: warn certificate: until 20") and "a running node reloads it" in told
    viewers = check_certificate(folder / "viewer.pem", folder / "viewer.key")
    assert is_bad(viewers, Verdict.FAIL, found="unsuitable certificate purpose", advice="new server certificate")
    over = datetime.now(UTC) - timedelta(minutes=1)
    certs.write_pair(folder, "node", *certs.issue(certs.read_authority(folder), "node", hosts=["node-a"], until=over))
    capsys.readouterr()
    security = [f"security.cert={pair[0]}", f"security.key={pair[1]}", f"security.client_ca={folder}/ca.pem"]
    overrides = ["coordinator.listen=0.0.0.0:1", *security]
    assert main(["doctor", str(config), *(part for one in overrides for part in ("--set", one)), "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert (findings["security"]["verdict"], findings["certificate"]["verdict"]) == ("ok", "fail")
    assert "certificate has expired" in findings["certificate"]["found"] and findings["certificate"]["advice"]


def test_a_tracker_that_is_not_installed_is_found(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tasuki.runs.trackers.find_spec", lambda name: None)
    assert main(["doctor", str(config), "--set", 'track.to=["wandb"]', "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert install_extras("wandb") in findings["trackers"]["found"]


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_nvcc_older_than_torchs_cuda_is_found_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = "Cuda compilation tools, release 12.4, V12.4.131"
    write_program(tmp_path / "nvcc", f'[ "$1" = --version ] && echo "{said}"')
    write_program(tmp_path / "cc", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = GpuFacts((13, 0), [Gpu("H100", 80 * GB, 79 * GB, {})])

    def compilers() -> Finding:
        findings = gpu_findings(facts, torch_cuda=(13, 0), node_runs=False)
        return next(finding for finding in findings if finding.name == "compilers")

    assert is_bad(compilers(), Verdict.WARN, found="nvcc of CUDA 12.4, torch is built for 13.0", advice="PATH")
    for broken in ("exit 1", "echo nothing", f'echo "{said}"; exit 1', "printf '\\377'"):
        write_program(tmp_path / "nvcc", broken)
        assert is_bad(compilers(), Verdict.WARN, found="version is unknown", advice="--version")


def test_memory_of_a_gpu_that_does_not_pass_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as in a container without its GPUs
    finding = check_passing("cuda:0")
    assert finding.name == "memory between processes, cuda:0"
    assert is_bad(finding, Verdict.FAIL, found="", advice="the same GPUs, or set trainer.export_handles")
    assert "CUDA" in finding.found or "NVIDIA" in finding.found


def test_faults_of_gpus_are_found():
    free = Gpu("H100", 80 * GB, 79 * GB + GB // 2, {})
    assert is_bad(check_driver(None, torch_cuda=(13, 0)), Verdict.FAIL, found="no NVIDIA driver", advice='device = "cpu"')
    assert is_bad(check_driver((12, 8), torch_cuda=(13, 0)), Verdict.FAIL, found="CUDA 12.8", advice="CUDA 13")
    assert is_bad(check_driver((13, 0), torch_cuda=(13, 1)), Verdict.WARN, found="13.0", advice="13.1")
    assert is_bad(
        check_driver((13, 0), torch_cuda=None), Verdict.WARN, found="torch", advice=install_extras("trainer", "rollout")
    )
    assert is_ok(check_driver((13, 1), torch_cuda=(13, 0)))
    assert is_bad(check_compilers(None, None), Verdict.FAIL, found="no C compiler", advice="gcc")
    assert is_bad(check_compilers(None, "/usr/bin/cc"), Verdict.WARN, found="no nvcc", advice="nvcc")
    both, cuda = ("/cuda/bin/nvcc", "/usr/bin/cc"), (13, 0)
    assert is_bad(
        check_compilers(*both, nvcc_cuda=(12, 8), torch_cuda=cuda),
        Verdict.WARN,
        found="CUDA 12.8, torch is built for 13.0",
        advice="13.0",
    )
    assert is_bad(
        check_compilers(*both, nvcc_cuda=None, torch_cuda=cuda), Verdict.WARN, found="unknown", advice="nvcc --version"
    )
    assert is_ok(check_compilers(*both, nvcc_cuda=(13, 0), torch_cuda=cuda))
    assert is_ok(check_compilers(*both, nvcc_cuda=(13, 1), torch_cuda=cuda))
    assert is_bad(check_peers([(0, 1)], num_gpus=2), Verdict.WARN, found="0-1", advice="same GPU")
    assert is_ok(check_peers([], num_gpus=8)) and is_ok(check_peers([], num_gpus=1))
    held = Gpu("H100", 80 * GB, 20 * GB, {4711: 60 * GB})
    assert is_bad(
        check_strangers([free, held], node_runs=False), Verdict.WARN, found="pid 4711 (60.0 GB on GPU 1)", advice="end these"
    )
    hidden = Gpu("H100", 80 * GB, 20 * GB, {})
    assert is_bad(check_strangers([hidden], node_runs=False), Verdict.WARN, found="not visible", advice="on the host")
    assert is_ok(check_strangers([held], node_runs=True)) and is_ok(check_strangers([free], node_runs=False))
    assert [finding.name for finding in gpu_findings(GpuFacts(None), torch_cuda=None, node_runs=False)] == ["driver"]


def test_a_plan_that_does_not_fit_the_gpus_is_found(config: Path):
    node = load_config(config, overrides=['device="cuda"'])
    found = check_plan(node, [Gpu("tiny", 1 << 20, 1 << 20, {})])
    assert is_bad(found, Verdict.FAIL, found="", advice="tasuki plan")
    sized = load_config(config, overrides=['device="cuda"', "rollout.kv_tokens=4096"])
    assert is_bad(check_plan(sized, []), Verdict.WARN, found="no GPU", advice="--gpu-gb")


def test_the_report_is_a_line_for_each_check_and_a_count(capsys: pytest.CaptureFixture[str], config: Path):
    assert main(["doctor", str(config), "--set", "model.path=/nonexistent"]) == 1
    printed = capsys.readouterr().out
    assert "fail  model" in printed and "-> change" in printed
    assert printed.splitlines()[-1].endswith("fail") and " ok, " in printed.splitlines()[-1]


def test_the_report_names_tables_in_brackets(capsys: pytest.CaptureFixture[str], config: Path):
    run = ["train.dataset=/nonexistent", "train.output_dir=run", "train.reward.function=a"]
    assert main(["doctor", str(config), *(part for one in run for part in ("--set", one))]) == 1
    assert "data of [train]" in capsys.readouterr().out


def test_little_locked_memory_matters_on_gpus_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "_may_lock", lambda: False)
    assert host.check_locked_memory(8 << 20, has_gpus=True).verdict is Verdict.WARN
    assert host.check_locked_memory(8 << 20, has_gpus=False).verdict is Verdict.OK
    assert host.check_locked_memory(0, has_gpus=False).verdict is Verdict.FAIL
