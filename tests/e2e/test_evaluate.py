"""`tasuki eval` and `tasuki export` after a short demo: equal weights have equal scores, also where completions are sampled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_demo import ENVIRONMENT, RUN, START_S

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * START_S)]
SETTINGS = ["train.num_steps=3", "train.save_every=2", "train.eval_every=2", "train.eval.temperature=1.0", "trainer.lora.rank=8",
            "trainer.learning_rate=1e-2"]  # fmt: skip


def run(*command: str | os.PathLike[str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_is_evaluated_again_by_its_model_its_checkpoint_and_the_exported_checkpoint(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    run(RUN, "--output", output, *(argument for setting in SETTINGS for argument in ("--set", setting)))
    scores = {step["step"]: step["eval_score"] for step in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())}
    assert scores[2] != scores[3]
    exported = tmp_path / "exported" / "model"
    saved = output / "checkpoints" / "version-000002"
    assert run("-m", "tasuki.cli", "export", output).startswith(f"{output / 'model-version-000002'} ")
    copy = shutil.copytree(saved, tmp_path / "copy")
    assert run("-m", "tasuki.cli", "export", copy, "--run", output).startswith(f"{tmp_path / 'model-copy'} ")
    run("-m", "tasuki.cli", "export", saved, "--output", exported)
    for arguments, name, step in (
        ([], "model", 3),
        (["--checkpoint", "2"], "version-000002", 2),
        (["--model", str(saved)], "version-000002", 2),
        (["--model", str(exported)], "exported-model", None),
    ):
        shown = run("-m", "tasuki.cli", "eval", output, *arguments)
        result = json.loads((output / "eval" / f"{name}.json").read_text())
        assert f"{result['figures']['score']:.4f}" in shown
        if step is not None:
            assert (result["figures"]["score"], result["recorded_step"]) == (scores[step], step)
            assert result["recorded"] == result["figures"]
        else:
            assert f"the run's {scores[3]:.4f}, step 3" in shown
    assert not (output / "eval" / "node" / "run").exists()
    bare, scores = output / "bare.toml", output / "scores" / "of_a_model"
    bare.write_text((output / "config.toml").read_text().partition("[train]")[0])
    rows = str(output / "task" / "eval.jsonl")
    flags = {
        "dataset": rows,
        "eval_dataset": rows,
        "max_new_tokens": 8,
        "reward.function": "reward:exact",
    }
    given = [word for name, value in flags.items() for word in ("--set", f"train.{name}={value}")]
    run("-m", "tasuki.cli", "eval", bare, "--model", str(exported), *given, "--set", f"train.output_dir={scores}")
    assert (scores / "eval" / "exported-model.json").exists() and scores.stat().st_mode & 0o777 == 0o700
