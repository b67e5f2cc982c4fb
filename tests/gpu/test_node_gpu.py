"""Whole runs on real GPUs: the demo learns with full weights, with merged and native LoRA adapters, and replicas.

Needs `make native`, CUDA GPUs and no network. A run takes about a minute.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ENVIRONMENT
from tests.gpu.node_settings import GPU

ROOT = Path(__file__).parents[2]
RUN_S = 400
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(RUN_S + 60),
]
LORA = ["trainer.lora.rank=16", "trainer.lora.alpha=32", "trainer.learning_rate=1.5e-2"]
RUNS = {
    "full": (1, []),
    "merged": (1, LORA),
    "adapter": (1, [*LORA, 'rollout.lora="adapter"']),
    "TP 2": (2, ["trainer.num_ranks=2", "rollout.tp_size=2"]),
    "two replicas": (2, ["trainer.num_ranks=2"]),
    "adapter at TP 2": (2, [*LORA, 'rollout.lora="adapter"', "trainer.num_ranks=2", "rollout.tp_size=2"]),
    "four ranks, two replicas of TP 2": (4, ["trainer.num_ranks=4", "rollout.tp_size=2"]),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_the_demo_learns(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    num_gpus, overrides = RUNS[name]
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    settings = ["trainer.num_ranks=1", *GPU, *overrides]
    arguments = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, ROOT / "client/examples/demo/run.py", "--seed", "0", "--output", tmp_path / "demo", *arguments]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").open()]
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    gaps = [step["metrics"]["log_prob_gap"] for step in steps if "log_prob_gap" in step["metrics"]]
    for figure, value in {**summary, "max_mean_gap": max(gaps), **medians(steps)}.items():
        record_property(figure, value)
    assert summary["eval_score_after"] > summary["eval_score_before"] + 0.4
    # Gap between trainer and rollout on the same tokens: bfloat16 rounding. Wrong weights or adapters would differ by much more.
    assert max(gaps) < 0.05


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Median milliseconds of each stage."""
    return {
        stage: round(1e3 * statistics.median(step["stage_seconds"].get(stage, 0.0) for step in steps), 1)
        for stage in steps[-1]["stage_seconds"]
    }
