"""A supervised run of a whole node against plain training in transformers, even after losing its client and its node."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasuki.client.dataset import Dataset
from tasuki.client.sft_data import read_sft_jsonl
from tasuki.client.types import TrainingSample
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.runs.tokenizer import ModelTokenizer
from tests.conftest import ENVIRONMENT, assert_clean_audit, tasuki
from tests.models import make_model, save_checkpoint

pytestmark = pytest.mark.timeout(900)
LEARNING_RATE, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-2, 1e-3, 0.01, 0.5
SAMPLES_PER_STEP, NUM_STEPS, NUM_MORE = 4, 7, 2
START_S = 420
# Sums over two ranks and packed batches round differently from one model's over padded batches.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Figures:
    """Figures of each step of a plain training, and the held-out loss before the first and after every step."""

    losses: list[float]
    grad_norms: list[float]
    held_out: list[float]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Folder with a model, data, and a node's configuration. Not pytest's own folder: the path of a unix socket must be short."""
    folder = Path(tempfile.mkdtemp(prefix="tasuki-"))
    model = save_checkpoint(make_model("qwen2", seed=0), folder / "model")
    words = ["ab", "bcd", "cde", "defg", "e", "fgh", "ghij", "hi", "ijk", "jklm"]
    for name, some in (("train", words[:7]), ("eval", words[7:])):
        rows = [{"prompt": f"{word}>", "completion": word[::-1]} for word in some]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "node.toml").write_text(
        f"""
        state_dir = "node"
        [model]
        path = "{model}"
        [trainer]
        num_ranks = 2
        compute_dtype = "float32"
        learning_rate = {LEARNING_RATE}
        eps = {EPS}
        weight_decay = {WEIGHT_DECAY}
        max_grad_norm = {MAX_GRAD_NORM}
        micro_batch_tokens = 16
        [rollout]
        engine.max_total_tokens = 1024
        [coordinator]
        stage_timeout_s = {START_S}
        [sft]
        dataset = "train.jsonl"
        eval_dataset = "eval.jsonl"
        output_dir = "run"
        num_steps = {NUM_STEPS}
        samples_per_step = {SAMPLES_PER_STEP}
        eval_every = 1
        save_every = 2
        """
    )
    yield folder
    stopped = tasuki("down", folder / "node.toml", timeout_s=60)
    assert stopped.returncode == 0, stopped.stderr
    shutil.rmtree(folder)


def test_a_run_is_plain_training_also_when_its_client_and_then_its_node_were_lost(folder: Path) -> None:
    up = tasuki("up", folder / "node.toml", timeout_s=START_S + 60)
    assert up.returncode == 0, up.stderr
    killed = _train(folder, kill_at="step   3")
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    resumed = _train(folder, "--resume", "--no-start")
    assert resumed.returncode == 0, resumed.stdout
    assert "resuming from the node's own policy version" in resumed.stdout
    expected = _plain_training(folder, num_steps=NUM_STEPS + NUM_MORE)
    _check_figures(folder, expected, num_steps=NUM_STEPS)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["policy_version"]) == (NUM_STEPS, NUM_STEPS)
    assert summary["eval_loss_before"] - summary["eval_loss_after"] > 0.1
    for name in ("curve.png", "model/config.json"):
        assert (folder / "run" / name).exists()

    # Continues from a checkpoint, on a node that starts from its model.
    assert tasuki("down", folder / "node.toml", timeout_s=60).returncode == 0
    longer = _train(folder, "--resume", "--set", f"sft.num_steps={NUM_STEPS + NUM_MORE}")
    assert longer.returncode == 0, longer.stdout
    assert "version-000006: step 6 of 9" in longer.stdout
    assert holder(folder / "node", name=NODE_LOCK) is None
    _check_figures(folder, expected, num_steps=NUM_STEPS + NUM_MORE)
    assert_clean_audit(folder / "run")


def _train(folder: Path, *options: str, kill_at: str | None = None) -> subprocess.CompletedProcess[str]:
    """kill_at: start of the line at which the client is killed."""
    argv = [sys.executable, "-m", "tasuki.cli", "train", str(folder / "node.toml"), *options]
    lines: list[str] = []
    with subprocess.Popen(argv, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if kill_at is not None and line.startswith(kill_at):
                process.kill()
    return subprocess.CompletedProcess(argv, process.returncode, "".join(lines))


def _check_figures(folder: Path, expected: Figures, *, num_steps: int) -> None:
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(num_steps + 1))
    # A step whose line was lost with the client has no figures.
    lost = [step["step"] for step in steps[:-1] if "loss" not in step["metrics"]]
    assert len(lost) <= 1
    for step in steps:
        number = step["step"]
        assert step["policy_version"] == number
        assert "RESUME_KV" not in step["stage_seconds"]  # no rollout was requested
        if number not in lost:
            assert step["metrics"]["eval/loss"] == pytest.approx(expected.held_out[number], abs=TOLERANCE)
        if number not in lost and number < num_steps:
            assert step["metrics"]["loss"] == pytest.approx(expected.losses[number], abs=TOLERANCE)
            assert step["grad_norm"] == pytest.approx(expected.grad_norms[number], rel=1e-4)


def _plain_training(folder: Path, *, num_steps: int) -> Figures:
    """Trains on the same rows in the same order: one model in one process, one sample at a time, torch's AdamW."""
    tokenizer = ModelTokenizer(folder / "model")
    samples, eval_samples = (read_sft_jsonl(folder / f"{name}.jsonl", tokenizer, max_tokens=16) for name in ("train", "eval"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY)
    dataset = Dataset(samples, seed=0)
    figures = Figures([], [], [_loss(model, eval_samples).item()])
    for _ in range(num_steps):
        loss = _loss(model, dataset.next_rows(SAMPLES_PER_STEP))
        optimizer.zero_grad()
        loss.backward()
        figures.losses.append(loss.item())
        figures.grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        optimizer.step()
        figures.held_out.append(_loss(model, eval_samples).item())
    return figures


def _loss(model: torch.nn.Module, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """Mean over the completions' tokens, by the model's own loss."""
    total, num_tokens = torch.zeros(()), 0
    for sample in samples:
        prompt, completion = list(sample.prompt_token_ids), list(sample.completion_token_ids)
        labels = torch.tensor([[-100] * len(prompt) + completion])
        output = model(input_ids=torch.tensor([prompt + completion]), labels=labels)
        total, num_tokens = total + output.loss * len(completion), num_tokens + len(completion)
    return total / num_tokens
