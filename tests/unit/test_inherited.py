"""Variables that a node's processes inherit."""

from __future__ import annotations

import pytest

from tasuki.supervisor.inherited import without_secrets


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN",
        "OPENAI_APIKEY", "PG_PASSWORD_FILE", "MLFLOW_TRACKING_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "github_token",
    ],
)  # fmt: skip
def test_a_name_that_tells_of_a_secret_is_dropped(name: str) -> None:
    assert without_secrets({name: "s", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "OTEL_EXPORTER_OTLP_HEADERS", "SECRETARY", "KEYBOARD"],
)
def test_other_names_are_kept(name: str) -> None:
    assert without_secrets({name: "1"}) == {name: "1"}
