"""The demo as a user runs it, only shorter: what it shows, what it leaves, and that nothing of it goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tasuki.rpc.metric_names import ALL
from tests.integration.rollout_process import left_of, shared_memory

ROOT = Path(__file__).parents[2]
RUN = ROOT / "client" / "examples" / "demo" / "run.py"
NUM_STEPS, SAVE_EVERY, NUM_SHORT_STEPS = 12, 4, 8
MARK = "TASUKI_TEST_RUN"
# A start takes under a minute on two free cores, and minutes on a busy machine.
START_S = 540
pytestmark = pytest.mark.timeout(START_S + 60)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in ("protos", "services", "client"))}
SHORT = [f"train.num_steps={NUM_STEPS}", "train.eval_every=100", "train.loss.kl_coef=0.001", f"train.save_every={SAVE_EVERY}"]
SHORTER = [*SHORT, f"train.num_steps={NUM_SHORT_STEPS}"]

# In a process of its own, as the user of an exported model.
GREEDY = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
run = Path(sys.argv[1])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(run / "model", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(run / "model")
rows = [json.loads(line) for line in (run / "task" / "eval.jsonl").open()]
token_ids = torch.tensor([tokenizer.encode(row["prompt"]) for row in rows])
made = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), do_sample=False, max_new_tokens=6)
answers = tokenizer.batch_decode(made[:, token_ids.shape[1]:], skip_special_tokens=True)
print(sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True)) / len(rows))
"""


def _demo(output: Path, *overrides: str) -> subprocess.Popen[str]:
    arguments = [argument for override in overrides for argument in ("--set", override)]
    return subprocess.Popen(
        [sys.executable, RUN, "--seed", "0", "--output", output, *arguments],
        env={**ENVIRONMENT, MARK: str(output)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _processes_of(output: Path) -> dict[int, str]:
    """Command lines by pid of what the run started: processes with its mark in their environment, or its logs open."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            names = [os.readlink(link) for link in (folder / "fd").iterdir()]
            is_ours = f"{MARK}={output}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if is_ours or any(name.startswith(str(output)) for name in names):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended while we looked
    return found


def _scrape(port: int, output: Path, ended: threading.Event) -> None:
    """Keeps the last answer of the node's metrics in a file until the run has ended, and how many requests it saw."""
    most = 0.0
    while not ended.wait(0.3):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
            (output / "scraped.txt").write_text(text)
            most = max([most, *map(float, re.findall(r"^tasuki_rollout_running_requests\S* (\S+)$", text, re.MULTILINE))])
            (output / "most_running.txt").write_text(str(most))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, unused_tcp_port_factory) -> tuple[Path, str]:
    """The folder and the output of a short demo, with metrics and a tracker."""
    output, port, ended = tmp_path_factory.mktemp("runs") / "demo", unused_tcp_port_factory(), threading.Event()
    scraper = threading.Thread(target=_scrape, args=(port, output, ended))
    seen = [f"metrics.listen=127.0.0.1:{port}", 'track.to=["tensorboard"]', "rollout.engine.chunked_prefill_size=2048"]
    with _demo(output, *SHORT, *seen) as process:
        scraper.start()
        try:
            text, _ = process.communicate(timeout=START_S)
        finally:
            ended.set()
            process.send_signal(signal.SIGINT)
    scraper.join()
    assert process.returncode == 0, text
    return output, text


def test_a_scrape_of_the_running_node_has_every_metric_and_no_other(run: tuple[Path, str]):
    families = {family.name: family for family in text_string_to_metric_families((run[0] / "scraped.txt").read_text())}
    ours = {
        f"{name}_total" if family.type == "counter" else name for name, family in families.items() if name.startswith("tasuki_")
    }
    assert ours == {metric.name for metric in ALL}
    tokens = {sample.labels["service"]: sample.value for sample in families["tasuki_policy_version"].samples}
    assert tokens["trainer"] >= 1
    memory = {(sample.labels["service"], sample.labels["tag"]) for sample in families["tasuki_memory_mapped_bytes"].samples}
    planned = {(sample.labels["service"], sample.labels["tag"]) for sample in families["tasuki_memory_planned_bytes"].samples}
    assert {("trainer", "weights"), ("trainer", "optimizer"), ("rollout", "weights"), ("rollout", "kv_cache")} <= memory
    assert planned & memory
    uses = {sample.labels["use"] for sample in families["tasuki_gpu_seconds"].samples}
    assert {"generate", "forward_backward", "optim_step", "changeover"} <= uses
    assert 0 < float((run[0] / "most_running.txt").read_text()) <= 64 * 8


def test_samples_have_the_trainers_log_probs_close_to_rollouts(run: tuple[Path, str]):
    files = sorted((run[0] / "samples").iterdir())
    assert [file.name for file in files] == [f"step-{number:06d}.jsonl" for number in range(NUM_STEPS)]
    lines = [json.loads(line) for line in files[-1].read_text().splitlines()]
    assert len(lines) == 4 * 8 and {line["policy_version"] for line in lines} == {NUM_STEPS - 1}
    step = json.loads((run[0] / "metrics.jsonl").read_text().splitlines()[NUM_STEPS - 1])
    assert 0 < max(line["log_prob_gap_max"] for line in lines) <= step["metrics"]["log_prob_gap_max"] * 1.01 + 1e-6
    assert all(line["rewards"].keys() == {"reward:exact"} or len(line["rewards"]) == 1 for line in lines)


def test_the_tracker_has_every_step(run: tuple[Path, str]):
    assert json.loads((run[0] / "track/tensorboard.json").read_text()) == {"last_step": NUM_STEPS}
    assert list((run[0] / "track/tensorboard").glob("events.*"))
    assert "tracker tensorboard" not in run[1]


def test_the_summary_has_the_figures_and_the_score_has_risen(run: tuple[Path, str]):
    summary = json.loads((run[0] / "summary.json").read_text())
    assert summary["eval_score_before"] < 0.5
    assert summary["eval_score_after"] > summary["eval_score_before"] + 0.2
    assert summary["policy_version"] == summary["steps"] == NUM_STEPS
    # There and back for each step, and there and back for the last evaluation and the export.
    assert summary["changeovers"] == 2 * (NUM_STEPS + 1)
    assert 0 < summary["log_prob_gap_max"] < 1e-3  # both compute in float32
    assert summary["seed"] == 0
    assert summary["seconds"] > 0


def test_progress_names_version_reward_and_held_out_score(run: tuple[Path, str]):
    steps = [line for line in run[1].splitlines() if line.startswith("step ")]
    assert len(steps) == NUM_STEPS + 1
    assert all("version" in line for line in steps)
    assert all("reward" in line for line in steps[:-1])
    assert "held-out" in steps[0]
    assert "held-out" in steps[-1]


def test_metrics_have_every_part_and_every_stage_of_a_step(run: tuple[Path, str]):
    steps = [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(NUM_STEPS + 1))
    parts = {"to_rollout", "generate", "reward", "to_train", "ref_log_probs", "forward_backward", "optim_step"}
    assert parts <= steps[1]["seconds"].keys()
    assert len(steps[1]["stage_seconds"]) == 9
    # The first samples come from the reference itself, whose weights are those of the policy.
    assert steps[0]["metrics"]["ref_kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-2]["metrics"]["ref_kl"] > 1e-3
    assert steps[0]["policy_version"] == 0


def test_the_exported_model_reproduces_the_score_in_transformers(run: tuple[Path, str]):
    done = subprocess.run([sys.executable, "-c", GREEDY, run[0]], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    after = json.loads((run[0] / "summary.json").read_text())["eval_score_after"]
    assert float(done.stdout) == pytest.approx(after, abs=0.02)


def test_curve_journal_and_checkpoint_are_there(run: tuple[Path, str]):
    assert (run[0] / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((run[0] / "checkpoints" / "version-000012").iterdir())
    with closing(sqlite3.connect(run[0] / "journal.sqlite")) as journal:
        (num_changeovers,) = journal.execute("SELECT count(*) FROM changeovers").fetchone()
    assert num_changeovers == 2 * (NUM_STEPS + 1)


def test_nothing_of_the_demo_goes_on(run: tuple[Path, str]):
    assert _processes_of(run[0]) == {}
    assert not (run[0] / "node" / "run").exists()


def test_ctrl_c_while_it_trains_leaves_nothing_and_the_run_is_resumed_on_the_same_path(run: tuple[Path, str], tmp_path: Path):
    output = tmp_path / "demo"
    with _demo(output, *SHORTER) as process:
        assert process.stdout is not None
        lines, shared = [], set[int]()
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step   1"):
                shared = shared_memory(list(_processes_of(output)))
            if line.startswith(f"step {SAVE_EVERY:>3}"):  # one more than is saved
                break
        os.killpg(process.pid, signal.SIGINT)
        interrupted = time.monotonic()
        rest = process.stdout.read()
        assert process.wait(timeout=30) == 130, "".join(lines) + rest
    assert time.monotonic() - interrupted < 20
    assert "Traceback" not in rest
    assert _processes_of(output) == {}
    assert not (output / "node" / "run").exists()
    assert left_of(shared) == []
    # What was measured until then is there.
    assert len((output / "metrics.jsonl").read_text().splitlines()) > SAVE_EVERY

    arguments = [argument for override in SHORTER for argument in ("--set", override)]
    resumed = subprocess.run(
        [sys.executable, "-m", "tasuki.cli", "train", output / "config.toml", "--resume", *arguments],
        cwd=RUN.parent, env=ENVIRONMENT, capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"version-{SAVE_EVERY:06d}: step {SAVE_EVERY} of {NUM_SHORT_STEPS}" in resumed.stderr
    assert _figures(output) == _figures(run[0])
    assert json.loads((output / "summary.json").read_text())["policy_version"] == NUM_SHORT_STEPS
    assert (output / "curve.png").exists()


def _figures(output: Path) -> list[object]:
    """All that is measured of a run's first steps but seconds."""
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in figures.items() if name not in ("seconds", "stage_seconds")}
        for figures in steps[:NUM_SHORT_STEPS]
    ]
