"""`tasuki doctor`: each fault of the machine, of a configuration, its data, its rewards or its certificate is found."""

import errno
import json
import os
import pwd
import resource
import socket
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasuki.cli import certs
from tasuki.cli.__main__ import main
from tasuki.config.load import load_config
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.doctor import host
from tasuki.doctor import node as doctor_node
from tasuki.doctor.finding import Finding, Verdict, check_certificate, ok, warn_of_certificate
from tasuki.doctor.host import Gpu, GpuFacts, check_compilers, check_driver, check_strangers, gpu_findings, read_gpu_facts
from tasuki.doctor.node import check_datasets, check_passing, check_plan, node_findings
from tasuki.memory.host import HostMemory, host_memory
from tasuki.wire.extras import install_extras
from tests.conftest import ENVIRONMENT
from tests.tiny_disk import tmpfs
from tests.unit.doctor import examined, finding_of, is_bad, is_ok

GB = 10**9


class NVMLError(Exception):
    pass


class Library(SimpleNamespace):
    """Two GPUs; the second one does not list its processes."""

    NVMLError = NVMLError

    def nvmlInit(self) -> None:
        if self.is_missing:
            raise NVMLError

    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=100, free=90 - handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if handle:
            raise NVMLError
        return [SimpleNamespace(pid=7, usedGpuMemory=None), SimpleNamespace(pid=8, usedGpuMemory=3)]


def test_faults_of_the_machine_are_found(tmp_path: Path):
    assert is_bad(host.check_user(lambda: pwd.getpwuid(2**31 - 5)[0]), Verdict.FAIL, found="has no name", advice="USER")
    missing = host.check_native_library(tmp_path / "no.so")
    assert is_bad(missing, Verdict.FAIL, found="no.so is missing", advice="make native")
    assert is_bad(host.check_processes(tmp_path), Verdict.FAIL, found="hides other processes", advice="hidepid")
    assert is_bad(host.check_open_files(512), Verdict.FAIL, found="512", advice="65536")
    assert is_bad(host.check_open_files(4096), Verdict.WARN, found="4096", advice="65536")
    assert is_ok(host.check_open_files(resource.RLIM_INFINITY))


def test_small_shared_memory_is_found(tmp_path: Path):
    with tmpfs(tmp_path / "shm", num_kib=1024) as disk:
        assert is_bad(host.check_shared_memory(disk.folder), Verdict.FAIL, found="MiB free", advice="--shm-size")
    with tmpfs(tmp_path / "shm64", num_kib=64 * 1024) as disk:
        assert is_ok(host.check_shared_memory(disk.folder))
        assert is_bad(host.check_shared_memory(disk.folder, num_ranks=2), Verdict.WARN, found="MiB free", advice="NCCL")
    assert host.check_shared_memory(tmp_path / "none").verdict is Verdict.FAIL


def test_a_disk_without_room_is_found(tmp_path: Path):
    with tmpfs(tmp_path / "disk", num_kib=1024) as disk:
        found = host.check_disk("state_dir", disk.folder / "new" / "node", needed_bytes=0)
        assert is_bad(found, Verdict.FAIL, found=f"at {disk.folder}", advice="choose another state_dir")
    found = host.check_disk("train.output_dir", tmp_path, needed_bytes=10**18, what="5 checkpoints")
    assert is_bad(found, Verdict.WARN, found="5 checkpoints take 1000000000.0 GB", advice="free space")


def test_a_backend_that_is_not_installed_is_found(
    node_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tasuki.trainer.backends.megatron.VERSION", "0.0")
    code, findings = examined(capsys, node_file, ['trainer.backend="megatron"'])
    assert (code, findings["backend"]["verdict"]) == (1, "fail") and "megatron-core 0.0" in findings["backend"]["found"]


def test_a_port_that_is_taken_is_found(node_file: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, findings = examined(capsys, node_file, [f"metrics.listen=127.0.0.1:{port}"])
        assert code == 1 and findings["port of metrics.listen"]["verdict"] == "fail"
    assert is_ok(host.check_port("metrics.listen", "127.0.0.1", port))


def test_little_locked_memory_matters_on_gpus_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert host.check_locked_memory(8 << 20, has_gpus=True).verdict is Verdict.WARN
    assert host.check_locked_memory(8 << 20, has_gpus=False).verdict is Verdict.OK
    assert host.check_locked_memory(0, has_gpus=False).verdict is Verdict.FAIL


@pytest.mark.parametrize("call", ["pidfd_open", "memfd_create"])
def test_a_namespace_that_forbids_what_a_node_calls_is_found(call: str, monkeypatch: pytest.MonkeyPatch):
    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as under a seccomp profile

    monkeypatch.setattr(os, call, forbidden)
    assert is_bad(host.check_processes(Path("/proc")), Verdict.FAIL, found="not permitted", advice="seccomp")


def test_a_disk_that_cannot_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)  # root may write everywhere
    found = host.check_disk("state_dir", tmp_path / "node", needed_bytes=0)
    assert is_bad(found, Verdict.FAIL, found=f"{tmp_path} cannot be written", advice="choose another state_dir")
    assert is_bad(host.check_shared_memory(tmp_path), Verdict.FAIL, found="free", advice="--shm-size")


def test_missing_compilers_are_found():
    assert is_bad(check_compilers(None, None), Verdict.FAIL, found="no C compiler", advice="gcc")
    assert is_bad(check_compilers(None, "/usr/bin/cc"), Verdict.WARN, found="no nvcc", advice="nvcc")
    assert is_ok(check_compilers("/usr/local/cuda/bin/nvcc", "/usr/bin/cc"))


def test_faults_of_gpus_are_found():
    assert is_bad(check_driver(None, torch_cuda=(13, 0)), Verdict.FAIL, found="no NVIDIA driver", advice='device = "cpu"')
    assert is_bad(check_driver((12, 8), torch_cuda=(13, 0)), Verdict.FAIL, found="CUDA 12.8", advice="CUDA 13")
    assert is_bad(check_driver((13, 0), torch_cuda=(13, 1)), Verdict.WARN, found="13.0", advice="13.1")
    assert is_bad(check_driver((13, 0), torch_cuda=None), Verdict.WARN, found="torch", advice="trainer")
    assert is_ok(check_driver((13, 1), torch_cuda=(13, 0)))
    free, held = Gpu(80 * GB, 79 * GB + GB // 2, {}), Gpu(80 * GB, 20 * GB, {4711: 60 * GB})
    found = check_strangers([free, held], node_runs=False)
    assert is_bad(found, Verdict.WARN, found="pid 4711 (60.0 GB on GPU 1)", advice="end these")
    hidden = check_strangers([Gpu(80 * GB, 20 * GB, {})], node_runs=False)
    assert is_bad(hidden, Verdict.WARN, found="not visible", advice="on the host")
    assert is_ok(check_strangers([held], node_runs=True)) and is_ok(check_strangers([free], node_runs=False))
    assert [finding.name for finding in gpu_findings(GpuFacts(None), torch_cuda=None, node_runs=False)] == ["driver"]


def test_facts_of_gpus_are_nvmls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", Library(is_missing=False))
    assert read_gpu_facts() == GpuFacts((13, 1), [Gpu(100, 90, {7: 0, 8: 3}), Gpu(100, 89, {})])
    monkeypatch.setitem(sys.modules, "pynvml", Library(is_missing=True))
    assert read_gpu_facts() == GpuFacts(None)


NO_CHUNK = """
class OfNoChunk(probe.Export):
    def __init__(self, arena):
        super().__init__(arena)
        nowhere = os.open("/dev/null", os.O_RDWR)
        self.chunks = [chunk._replace(fd=nowhere) for chunk in self.chunks]
probe.Export = OfNoChunk
"""
OTHER_BYTES = "probe._PATTERN = bytes(len(probe._PATTERN))"
READER_KILLED = """
run = subprocess.run
probe.subprocess.run = lambda argv, **options: run(["sh", "-c", "kill -9 $$"], **options)
"""


@pytest.mark.parametrize(
    ("fault", "found"), [(NO_CHUNK, "not a sealed memfd"), (OTHER_BYTES, "reads other bytes"), (READER_KILLED, "ended with -9")]
)
def test_memory_that_does_not_pass_between_processes_is_found(fault: str, found: str, monkeypatch: pytest.MonkeyPatch):
    """fault: Python code for the writing process."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    imports = "import os, subprocess, sys\nfrom tasuki.memory import shared_chunks as probe\n"
    program = [sys.executable, "-c", f"{imports}{fault}\nsys.exit(probe.main(sys.argv[1:]))"]
    assert is_bad(check_passing("cpu", probe=program), Verdict.FAIL, found=found, advice="allow memfd_create")


def test_a_probe_that_cannot_run_is_found(tmp_path: Path):
    finding = check_passing("cpu", probe=[str(tmp_path / "python")])
    assert is_bad(finding, Verdict.FAIL, found="No such file", advice="python -m tasuki.memory.shared_chunks cpu")


def test_a_plan_that_does_not_fit_is_found(node_file: Path):
    node, total = load_config(node_file, overrides=['device="cuda"']), host_memory().total_bytes
    tiny = [Gpu(1 << 20, 1 << 20, {})]
    assert is_bad(check_plan(node, tiny, free_bytes=total), Verdict.FAIL, found="", advice="tasuki plan")
    assert is_bad(check_plan(node, [], free_bytes=total), Verdict.WARN, found="no GPU", advice="--gpu-gb")
    finding = check_plan(load_config(node_file), [], free_bytes=1 << 20)
    assert is_bad(finding, Verdict.WARN, found="0.0 GB are free now", advice="end other programs")


def test_a_node_that_runs_is_not_warned_of_the_memory_that_it_holds(node_file: Path, monkeypatch: pytest.MonkeyPatch):
    config, host = load_config(node_file), HostMemory(host_memory().total_bytes, 1 << 20)
    monkeypatch.setattr(doctor_node, "host_memory", lambda: host)
    config.state_dir.mkdir(parents=True, exist_ok=True)

    def verdicts() -> list[Verdict]:
        found = node_findings(config, [], config_dir=node_file.parent, lacking={})
        return [one.verdict for one in found if one.name == "memory plan"]

    assert verdicts() == [Verdict.WARN]
    with StateLock.take(config.state_dir, name=NODE_LOCK):
        assert verdicts() == [Verdict.OK]


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
    assert findings["model"]["verdict"] == "warn"
    assert findings["memory plan"]["verdict"] != "fail"  # a warning where little memory is free now
    assert "14.20 GB of weights are not here" in findings["model"]["found"]


def test_the_report_is_a_line_for_each_check_and_a_count(capsys: pytest.CaptureFixture[str], node_file: Path):
    run = ["train.dataset=/nonexistent", "train.output_dir=run", "train.reward.function=a", "model.path=/nonexistent"]
    assert main(["doctor", str(node_file), *(part for one in run for part in ("--set", one))]) == 1
    printed = capsys.readouterr().out
    assert "fail  model" in printed and "-> change" in printed and "data of [train]" in printed
    assert printed.splitlines()[-1].endswith("fail") and " ok, " in printed.splitlines()[-1]
