"""A node configured for GPUs on a machine without any: the error comes before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.config.gpus import gpu_not_shown

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **SIZES}))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "model.safetensors").touch()
    file = tmp_path / "node.toml"
    file.write_text('state_dir = "node"\n[model]\npath = "model"\n')
    return file


def refused(node: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs `tasuki up` on CUDA and returns its one-line error; no node was started."""
    assert main(["up", str(node), "--set", 'device="cuda"']) == 2
    assert not (node.parent / "node").exists()
    said = capsys.readouterr().err
    assert said.startswith("tasuki: error INVALID_ARGUMENT: ") and said.count("\n") == 1
    return said


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_a_node_on_gpus_that_are_all_hidden_is_refused_at_once(
    node: Path, visible: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f'device = "cuda", but CUDA_VISIBLE_DEVICES="{visible}" hides all GPUs' in refused(node, capsys)


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_a_node_on_gpus_is_refused_at_once_where_there_are_none(
    node: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert 'device = "cuda", but this machine shows no GPU: set device = "cpu"' in refused(node, capsys)


def test_a_rank_without_its_gpu_names_what_was_set() -> None:
    none, too_few = gpu_not_shown("rollout", 0, num_shown=0), gpu_not_shown("trainer", 2, num_shown=2)
    assert none.metadata["field"] == "device" and none.message.startswith('device = "cuda", but CUDA shows no GPU')
    assert too_few.message.startswith(
        "trainer.devices: this rank's GPU is number 2, counted from 0, but CUDA shows 2; by default"
    )
