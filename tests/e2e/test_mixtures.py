"""Mixtures through a whole node: engine and trainer agree in every token while all that concerns experts is on at once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRONMENT
from tests.models import make_model, save_checkpoint

pytestmark = pytest.mark.timeout(400)
LIMIT_S = 300.0
REWARD = "def odd(prompt, completion, **fields):\n    return float(len(set(completion)) % 2)\n"
LORA = {"rank": 4, "experts": True, "target_modules": ["q_proj", "o_proj"]}
SPREAD = {"expert_parallel": True, "prefix_sharing": True}
MEGATRON = {"backend": "megatron", "megatron": {"tensor_parallel": 2, "expert_parallel": 2}}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "adapters": (
        "qwen3_moe",
        {"num_experts": 8},
        {**SPREAD, "lora": LORA, "checkpointing": "attention", "router_aux_loss_coef": 0.01},
        {"tp_size": 2},
    ),
    "biases": (
        "deepseek_v3",
        {"n_routed_experts": 8},
        {**SPREAD, "sequence_parallel": 2, "checkpointing": "full", "router_bias_update_rate": 0.01},
        {"tp_size": 1},
    ),
    "megatron": (
        "qwen3_moe",
        {"num_experts": 8, "vocab_size": 132},
        {**MEGATRON, "checkpointing": "full", "router_aux_loss_coef": 0.01},
        {"tp_size": 1},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_engine_and_trainer_agree_in_every_step(case: str, tmp_path: Path) -> None:
    kind, sizes, trainer, rollout = CASES[case]
    if case == "megatron":
        pytest.importorskip("megatron.core")
    save_checkpoint(make_model(kind, seed=0, **sizes), tmp_path / "model")
    (tmp_path / "odd_reward.py").write_text(REWARD)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": letter * 6}) + "\n" for letter in "abcdefgh"))
    (tmp_path / "node.toml").write_text('state_dir = "node"\ndevice = "cpu"\n[model]\npath = "model"\n')
    tables = {
        "trainer": {
            "num_ranks": 2, "learning_rate": 1e-3, "compute_dtype": "float32", **trainer,
        },
        "rollout": {"dtype": "float32", **rollout},
        "train": {
            "dataset": "train.jsonl", "output_dir": "run", "reward": {"function": "odd_reward:odd"}, "num_steps": 4,
            "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 24, "oversample": 2.0, "max_staleness": 4,
        },
    }  # fmt: skip
    settings = {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}
    arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={_toml(value)}")]
    command = [sys.executable, "-m", "tasuki.cli", "train", "node.toml", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line)["metrics"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][:4]
    assert all(
        metrics.get("log_prob_gap_max", 0.0) < 1e-5 for metrics in steps
    )  # absent where all tokens are of earlier policies
    # Tokens of earlier policies took the experts of these. Without any, the engine has every step's weights and biases.
    fresh = [metrics for metrics in steps if not metrics["carried_tokens"]]
    assert 1 < len(fresh) < len(steps)
    assert all(metrics["router_disagreement"] == 0.0 and "log_prob_gap_max" in metrics for metrics in fresh)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
