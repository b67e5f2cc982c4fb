"""Start of a node's processes: their environment, GPUs, locks and times."""

import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from tasuki.cli.__main__ import main
from tasuki.config.gpus import gpu_not_shown
from tasuki.config.lock import NODE_LOCK, Instance, StateLock, begin_instance, holder, lock_path, read_instance
from tasuki.config.paths import LAUNCHED_VARIABLE, log_path, replay_path
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.node import start
from tasuki.node.services import node_services, without_secrets
from tasuki.node.start import make_private
from tasuki.rpc.process_start import StartSeconds, read_start_seconds
from tasuki.wire.errors import DeadlineExceeded, InvalidArgument
from tasuki.wire.flock import is_free
from tests.conftest import ENVIRONMENT


def test_modules_in_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "bisect.py").write_text('open("taken", "w")')
    services = node_services(NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path)))
    for service in services:
        start = service.argv[: service.argv.index("-m")]
        subprocess.run([*start, "-c", "import bisect; bisect.bisect"], cwd=tmp_path, check=True)
    coordinator = next(service.argv for service in services if service.name == "coordinator")
    subprocess.run([*coordinator[: coordinator.index("--config")], "--help"], cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / "taken").exists()


def test_threads_of_ranks_on_a_cpu_do_not_spin_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def policies(device: Literal["cpu", "cuda"]) -> dict[str, str | None]:
        config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path), device=device)
        return {service.name: service.environment.get("OMP_WAIT_POLICY") for service in node_services(config)}

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert policies("cpu") == {"coordinator": None, "rollout": "PASSIVE", "trainer": "PASSIVE"}
    assert set(policies("cuda").values()) == {None}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert policies("cpu")["trainer"] == "ACTIVE"


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN",
        "OPENAI_APIKEY", "PG_PASSWORD_FILE", "MLFLOW_TRACKING_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "github_token",
        "PGPASSWORD", "PGPASSFILE", "SSHPASS", "MYSQL_PWD", "SMTP_PASS", "GITHUB_PAT", "GITHUBTOKEN", "KAGGLE_KEY", "NGC_KEY",
        "SWANLAB_KEY", "SECRET_KEY_BASE", "JWT", "SLURM_JWT", "REDISCLI_AUTH", "DOCKER_AUTH_CONFIG", "SSH_AUTH_SOCK", "DATABASE_URL",
        "MONGODB_URI", "CELERY_BROKER_URL", "AZURE_STORAGE_CONNECTION_STRING", "SLACK_WEBHOOK_URL", "SENTRY_DSN",
        "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    ],
)  # fmt: skip
def test_a_name_that_tells_of_a_secret_is_dropped(name: str) -> None:
    assert without_secrets({name: "s", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UV_INDEX_URL", "https://ci:s3cret@pypi.example/simple"),
        ("PIP_EXTRA_INDEX_URL", "https://a.example/simple https://glpat@b.example/simple"),
        ("HTTPS_PROXY", "http://me:s3cret@proxy:3128"),
        ("MLFLOW_TRACKING_URI", "postgresql+psycopg://me:s3cret@db/mlflow"),
        ("REPORTS", "https://store.example/reports?sp=rw&sig=abc%3D"),
        ("PG", "host=db user=me password=s3cret"),
        ("DEPLOY", "-----BEGIN OPENSSH PRIVATE KEY-----\nabc"),
    ],
)
def test_a_value_that_tells_of_a_secret_is_dropped(name: str, value: str) -> None:
    assert without_secrets({name: value}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PATH", "/usr/bin:/bin"), ("HOME", "/home/me"), ("PWD", "/work"), ("OLDPWD", "/"), ("USER", "me"), ("TMPDIR", "/tmp"),
        ("XAUTHORITY", "/run/xauth"), ("LD_LIBRARY_PATH", "/opt/lib"), ("LD_PRELOAD", "/opt/lib/a.so"), ("PYTHONPATH", "/a:/b"),
        ("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2"), ("CUDA_HOME", "/usr/local/cuda"), ("NVIDIA_VISIBLE_DEVICES", "all"),
        ("NCCL_IB_PKEY", "0x7fff"), ("NCCL_IB_HCA", "=mlx5_0:1"), ("NCCL_DEBUG", "INFO"), ("UCX_IB_PKEY", "0"), ("OMP_NUM_THREADS", "4"),
        ("HF_HOME", "/data/hf"), ("TOKENIZERS_PARALLELISM", "false"), ("TORCHINDUCTOR_CACHE_DIR", "/c"), ("PYTORCH_CUDA_ALLOC_CONF", "a:b"),
        ("SLURM_PROCID", "0"), ("SLURM_JOB_NODELIST", "n[1-2]"), ("JOB_COMPLETION_INDEX", "1"), ("JOBSET_NAME", "run"),
        ("MASTER_ADDR", "n1"), ("OTEL_BSP_SCHEDULE_DELAY", "100"), ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/client.key"),
        ("TASUKI_OTLP_HEADERS_FILE", "/otlp.headers"), ("OTEL_RESOURCE_ATTRIBUTES", "team=rl,host=a"), ("HTTP_PROXY", "http://proxy:3128"),
        ("UV_INDEX_URL", "https://pypi.example/simple"), ("TASUKI_PROOFS", "whole"), ("SECRETARY", "1"), ("KEYBOARD", "1"), ("MONKEY", "1"),
        ("AUTHOR", "me@example.com"),
    ],
)  # fmt: skip
def test_others_are_kept(name: str, value: str) -> None:
    assert without_secrets({name: value}) == {name: value}


def test_files_of_earlier_starts_become_private_and_an_open_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    files = [tmp_path / "journal.sqlite", tmp_path / "logs" / "trainer.log.old"]
    for file in files:
        file.touch()
        file.chmod(0o644)
    told: list[str] = []
    for mode in (0o750, 0o700):
        tmp_path.chmod(mode)
        make_private(tmp_path, tell=told.append)
        assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    assert told == [f"state_dir: others may list {tmp_path} (0750): chmod go-rwx {tmp_path}"]


HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def refused(node_file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs `tasuki up` on CUDA and returns its one-line error, after a warning of the vocabulary; no node was started."""
    assert main(["up", str(node_file), "--set", 'device="cuda"']) == 2
    assert not (node_file.parent / "node").exists()
    warning, said = capsys.readouterr().err.splitlines()
    assert warning.startswith("tasuki: warning: ") and said.startswith("tasuki: error INVALID_ARGUMENT: ")
    return said


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_a_node_on_gpus_that_are_all_hidden_is_refused_at_once(
    node_file: Path, visible: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f'device = "cuda", but CUDA_VISIBLE_DEVICES="{visible}" hides all GPUs' in refused(node_file, capsys)


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_a_node_on_gpus_is_refused_at_once_where_there_are_none(
    node_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert 'device = "cuda", but this machine shows no GPU: set device = "cpu"' in refused(node_file, capsys)


def test_a_rank_without_its_gpu_names_what_was_set() -> None:
    none, too_few = gpu_not_shown("rollout", 0, num_shown=0), gpu_not_shown("trainer", 2, num_shown=2)
    assert none.metadata["field"] == "device" and none.message.startswith('device = "cuda", but CUDA shows no GPU')
    assert too_few.message.startswith(
        "trainer.devices: this rank's GPU is number 2, counted from 0, but CUDA shows 2; by default"
    )


def test_parts_count_from_the_launch_and_add_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    launched = time.monotonic() - 5.0
    start = StartSeconds({LAUNCHED_VARIABLE: str(launched)})
    start.end("imports")
    time.sleep(0.2)
    start.end("engine", within={"weights": 0.1, "graphs": 0.05})
    before = time.monotonic()
    start.end("imports")
    after = time.monotonic()
    assert list(start.parts) == ["imports", "weights", "graphs", "engine"]
    assert start.parts["imports"] >= 5.0 and start.parts["weights"] == 0.1 and start.parts["engine"] >= 0.05
    assert before - launched <= sum(start.parts.values()) + 1e-6 <= after - launched + 2e-6
    assert read_start_seconds(tmp_path, "rollout") == {}
    start.tell(tmp_path, "rollout")
    assert read_start_seconds(tmp_path, "rollout") == pytest.approx(start.parts, abs=0.001)
    assert "event=started_in seconds=" in caplog.text


@pytest.mark.timeout(20)
def test_a_fifo_or_a_link_is_no_lock_and_nobody_waits_for_it(tmp_path: Path) -> None:
    lock, target = lock_path(tmp_path, name=NODE_LOCK), tmp_path / "target"
    target.write_text("kept")
    for make in (os.mkfifo, lambda path: path.symlink_to(target)):
        make(lock)
        assert holder(tmp_path, name=NODE_LOCK) is None
        with pytest.raises(InvalidArgument, match=r"state_dir: .*/node\.lock is not a regular file; remove it"):
            StateLock.take(tmp_path, name=NODE_LOCK)
        lock.unlink()
    assert target.read_text() == "kept"


def test_a_folder_and_those_above_it_are_created_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        StateLock.take(tmp_path / "runs" / "a", name=NODE_LOCK).close()
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("runs", "runs/a")} == {0o700}


IMPORTED = """
import gc
IS_COLLECTING = gc.isenabled()
KEPT = [[] for _ in range(1000)]
"""
PROGRAM = """
import gc, sys
sys.path.insert(0, sys.argv[1])
from tasuki.rpc.process_start import preload
before = gc.get_freeze_count()
preload("imported_before_forks")
import imported_before_forks
assert not imported_before_forks.IS_COLLECTING
assert gc.isenabled()
assert gc.get_freeze_count() >= before + 1000
"""


def test_nothing_is_collected_meanwhile_and_what_was_made_is_frozen(tmp_path: Path) -> None:
    (tmp_path / "imported_before_forks.py").write_text(IMPORTED)
    # In another process: objects frozen here would stay frozen.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_each_start_has_a_name_of_its_own_while_it_holds_the_lock(tmp_path: Path) -> None:
    assert read_instance(tmp_path) == Instance()
    names: list[str] = []
    for _ in range(2):
        with StateLock.take(tmp_path, name=NODE_LOCK):
            begin_instance(tmp_path)
            told = read_instance(tmp_path)
            assert told == read_instance(tmp_path)
            assert not is_free(Path(told.lock_path))
            names.append(told.id)
        assert is_free(Path(told.lock_path))
        assert read_instance(tmp_path) == Instance()  # killed, so its file is left
    assert len(set(names)) == 2
    assert all(names)


def test_a_lock_names_its_newest_holder_whatever_the_length_of_the_pid(tmp_path: Path) -> None:
    with StateLock.take(tmp_path, name=NODE_LOCK) as lock:
        for pid in (4_194_303, 7):
            lock.sign(pid)
            assert holder(tmp_path, name=NODE_LOCK) == pid


def test_a_start_waits_for_a_replay_as_long_as_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path))
    clock, told = [0.0], list[str]()

    def sleep(_: float) -> None:
        clock[0] += 100.0
        if clock[0] <= 3000:
            replay_path(config.state_dir).write_text(f"replaying command {clock[0] / 100:.0f} of 30")

    (log := log_path(config.state_dir, "trainer")).parent.mkdir(parents=True)
    log.write_text("imported\ncompiles kernels\n\n")
    monkeypatch.setattr(start, "_check_runs", lambda *_: None)
    monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with pytest.raises(DeadlineExceeded, match=f"; {log} ends: compiles kernels"):
        start.wait_until_serving(config, tell=told.append, supervisor=None)
    assert told[1] == f"starting coordinator, rollout, trainer: 200 s, replaying command 2 of 30; {log} ends: compiles kernels"
    assert 3000 + 900 <= clock[0] <= 3000 + 1200
