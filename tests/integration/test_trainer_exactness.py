"""A step of FSDP2 ranks against plain torch in one process: loss, gradients and parameters do not depend on the cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.trainer_samples import TEMPERATURE, PlainStep, make_samples, plain_step
from tests.integration.trainer_steps import NUM_SAMPLES
from tests.models import CONFIGS, VOCAB_SIZE, make_model, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = (23, 64, 4096)
"""Padded tokens in a micro-batch: one long sample, a few, all."""
# Three ranks leave shards of unequal size, and fewer experts than ranks can share evenly.
CASES = [
    *((2, kind, max_tokens) for kind in CONFIGS for max_tokens in BUDGETS),
    *((3, kind, 64) for kind in ("qwen2_tied", "qwen3_moe")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in CONFIGS:
        save_checkpoint(make_model(kind, seed=3), folder / kind)
    return folder


@pytest.fixture(scope="module")
def steps(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of results by number of ranks; one launch for each."""
    return {num_ranks: run_steps(num_ranks, models=models, output=tmp_path_factory.mktemp("steps")) for num_ranks in (2, 3)}


def run_steps(num_ranks: int, *, models: Path, output: Path) -> Path:
    cases = [f"{models / kind}:{max_tokens}" for each, kind, max_tokens in CASES if each == num_ranks]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    script = str(ROOT / "tests" / "integration" / "trainer_steps.py")
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("protos", "services", "client", "."))
    environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, script, str(output), *cases], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return output


@cache
def expected(folder: Path) -> PlainStep:
    return plain_step(folder, make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE, temperature=TEMPERATURE))


@pytest.mark.parametrize(("num_ranks", "kind", "max_tokens"), CASES)
def test_a_step_equals_plain_torch_however_it_is_cut(
    steps: dict[int, Path], models: Path, num_ranks: int, kind: str, max_tokens: int
) -> None:
    plain = expected(models / kind)
    facts = json.loads((steps[num_ranks] / f"{kind}-{max_tokens}.json").read_text())
    tensors = load_file(steps[num_ranks] / f"{kind}-{max_tokens}.safetensors")
    for name in ("loss", "entropy", "ref_kl", "clip_fraction", "log_prob_gap", "log_prob_gap_max"):
        assert facts["metrics"][name] == pytest.approx(getattr(plain, name), abs=1e-5), name
    assert facts["grad_norm"] == pytest.approx(plain.grad_norm, rel=1e-5)
    assert (facts["num_micro_batches"] > 1) is (max_tokens < 4096)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(_under(tensors, "gradient", name, gradient), gradient, rtol=1e-5, atol=1e-5)
    for name, parameter in plain.parameters.items():
        torch.testing.assert_close(_under(tensors, "parameter", name, parameter), parameter, rtol=1e-5, atol=1e-5)


def _under(tensors: dict[str, torch.Tensor], prefix: str, name: str, like: torch.Tensor) -> torch.Tensor:
    tensor = tensors[f"{prefix}.{name}"]
    assert tensor.shape == like.shape
    return tensor
