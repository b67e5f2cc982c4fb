"""Mixtures through a whole node: engine and trainer agree in every token while all that concerns experts is on at once."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tasuki.config.checks import check_model
from tasuki.config.load import config_of, put
from tasuki.models.known import read_model_shape
from tasuki.wire.errors import InvalidArgument
from tests.conftest import ENVIRONMENT
from tests.extent import IS_WHOLE, covering, only_whole
from tests.models import make_model, save_checkpoint

pytestmark = pytest.mark.timeout(400)
LIMIT_S = 300.0
REWARD = "def odd(prompt, completion, **fields):\n    return float(len(set(completion)) % 2)\n"
LORA = {"rank": 4, "target_modules": ["q_proj", "o_proj"]}
AXES: dict[str, tuple[Any, ...]] = {
    "trainer.expert_parallel": (True, False),
    "trainer.lora": (LORA | {"experts": True}, LORA, None),
    "trainer.router_replay": (True, "old_policy", False),
    "trainer.prefix_sharing": (True, False),
    "train.oversample": (2.0, 1.0),
    "trainer.checkpointing": ("attention", "full", "none", "offloaded"),
    "rollout.tp_size": (2, 1),
}
COMMON = {
    "trainer.num_ranks": 2, "trainer.learning_rate": 1e-3, "trainer.compute_dtype": "float32", "rollout.dtype": "float32",
    "train.dataset": "train.jsonl", "train.output_dir": "run", "train.reward.function": "odd_reward:odd", "train.num_steps": 4,
    "train.prompts_per_step": 4, "train.group_size": 4, "train.max_new_tokens": 24, "train.max_staleness": 4,
}  # fmt: skip
EVERY = [{**dict(zip(AXES, values, strict=True)), "trainer.router_aux_loss_coef": 0.01} for values in product(*AXES.values())]
DEEPSEEK = {
    "trainer.expert_parallel": True, "trainer.router_replay": True, "trainer.prefix_sharing": True, "train.oversample": 2.0,
    "trainer.checkpointing": "full", "trainer.sequence_parallel": 2, "trainer.router_bias_update_rate": 0.01,
}  # fmt: skip
MEGATRON = {
    "trainer.backend": "megatron", "trainer.megatron.tensor_parallel": 2, "trainer.megatron.expert_parallel": 2,
    "trainer.checkpointing": "full", "trainer.router_replay": True, "trainer.router_aux_loss_coef": 0.01, "train.oversample": 2.0,
}  # fmt: skip
HYBRID = {
    "trainer.expert_parallel": True,
    "trainer.checkpointing": "full",
    "trainer.router_replay": True,
    "train.oversample": 2.0,
}
CASES = [
    ("qwen3_5_moe", {"num_experts": 8}, HYBRID),
    pytest.param("qwen3_next", {"num_experts": 8}, HYBRID, marks=only_whole),
    ("deepseek_v3", {"n_routed_experts": 8}, DEEPSEEK),
    ("qwen3_moe", {"num_experts": 8, "vocab_size": 132}, MEGATRON),
    *(("qwen3_moe", {"num_experts": 8}, each) for each in covering(EVERY, size=2 if IS_WHOLE else 1)),
]


@pytest.mark.parametrize(("kind", "sizes", "case"), CASES)
def test_engine_and_trainer_agree_in_every_step(kind: str, sizes: dict[str, int], case: dict[str, Any], tmp_path: Path) -> None:
    if "trainer.backend" in case:
        pytest.importorskip("megatron.core")
    save_checkpoint(make_model(kind, seed=0, **sizes), tmp_path / "model")
    (tmp_path / "odd_reward.py").write_text(REWARD)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": letter * 6}) + "\n" for letter in "abcdefgh"))
    (tmp_path / "node.toml").write_text('state_dir = "node"\ndevice = "cpu"\n[model]\npath = "model"\n')
    needed = {"train.old_policy": "given"} if case["trainer.router_replay"] == "old_policy" else {}
    settings = {key: value for key, value in (COMMON | needed | case).items() if value is not None}
    arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={_toml(value)}")]
    command = [sys.executable, "-m", "tasuki.cli", "train", "node.toml", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line)["metrics"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][:4]
    # Absent where all tokens are of earlier policies.
    assert all(metrics.get("log_prob_gap_max", 0.0) < 1e-5 for metrics in steps)
    # Tokens of earlier policies took the experts of these. Without any, the engine has every step's weights and biases.
    fresh = [metrics for metrics in steps if not metrics.get("carried_tokens")]
    assert 1 < len(fresh) < len(steps) if case["train.oversample"] > 1 else len(fresh) == len(steps)
    assert all("log_prob_gap_max" in metrics for metrics in fresh)
    if case["trainer.router_replay"]:
        assert all(metrics["router_disagreement"] == 0.0 for metrics in fresh)
    if needed:  # also of tokens of earlier policies
        assert all(
            metrics["router_disagreement"] == 0.0 and metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5) for metrics in steps
        )


def test_every_combination_is_possible_or_refused_by_its_key(tmp_path: Path) -> None:
    shape = read_model_shape(save_checkpoint(make_model("qwen3_moe", seed=0, num_experts=8), tmp_path / "model"))
    base = {"state_dir": tmp_path, "device": "cpu", "model.path": tmp_path / "model", **COMMON}
    for case in EVERY:
        needed = {"train.old_policy": "given"} if case["trainer.router_replay"] == "old_policy" else {}
        for served in ("merged", "adapter"):
            table: dict[str, Any] = {}
            for key, value in (base | needed | case | {"rollout.lora": served}).items():
                if value is not None:
                    put(table, key, value)
            lora = case["trainer.lora"]
            # The engine serves adapters of linear layers alone.
            if served == "merged" or (lora is not None and "experts" not in lora):
                check_model(config_of(table), shape)
                continue
            with pytest.raises(InvalidArgument) as refused:
                check_model(config_of(table), shape)
            assert refused.value.metadata["field"] == "rollout.lora"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
