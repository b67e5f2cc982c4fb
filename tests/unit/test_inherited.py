"""Variables that a node's processes inherit, and the working folder, from which they import nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.node.services import node_services, without_secrets


def test_modules_in_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "bisect.py").write_text('open("taken", "w")')
    services = node_services(NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path)))
    for service in services:
        start = service.argv[: service.argv.index("-m")]
        subprocess.run([*start, "-c", "import bisect; bisect.bisect"], cwd=tmp_path, check=True)
    coordinator = next(service.argv for service in services if service.name == "coordinator")
    subprocess.run([*coordinator[: coordinator.index("--config")], "--help"], cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / "taken").exists()


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
