"""A shortened demo, run as a user would: its output, its files, that no process of it is left, and, among the long tests, a resume."""

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
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasuki.rpc.metrics import ALL
from tests.integration.rollout_process import left_of, shared_memory
from tests.limits import limit_s
from tests.otlp import ReceivedSpan, receiving

ROOT = Path(__file__).parents[2]
RUN = ROOT / "client" / "examples" / "demo" / "run.py"
NUM_STEPS, SAVE_EVERY = 6, 2
SAMPLE_FILES = [f"step-{number:06d}.jsonl" for number in range(NUM_STEPS)]
MARK = "TASUKI_TEST_RUN"
# A start takes under a minute on two free cores, and minutes on a busy machine.
START_S = 540
STOP_S = 60
pytestmark = pytest.mark.timeout(2 * START_S)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in ("protos", "services", "client"))}
SHORT = [
    f"train.num_steps={NUM_STEPS}", "train.eval_every=100", "train.loss.kl_coef=0.001", f"train.save_every={SAVE_EVERY}",
    "rollout.engine.chunked_prefill_size=2048",
]  # fmt: skip


def _score(folder: Path, rows: Sequence[dict[str, str]]) -> float:
    """Share of the rows that the exported model answers greedily in transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids = torch.tensor([tokenizer.encode(row["prompt"]) for row in rows])
    made = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), do_sample=False, max_new_tokens=6)
    answers = tokenizer.batch_decode(made[:, token_ids.shape[1] :], skip_special_tokens=True)
    return sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True)) / len(rows)


def _settings(*overrides: str) -> list[str]:
    return [argument for override in (*SHORT, *overrides) for argument in ("--set", override)]


def _demo(output: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, RUN, "--seed", "0", "--output", output, *_settings(*overrides)],
        env={**ENVIRONMENT, MARK: str(output)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _processes_of(output: Path) -> dict[int, str]:
    """Command lines by pid of the run's processes: those with its mark in their environment, or its logs open."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            names = [os.readlink(link) for link in (folder / "fd").iterdir()]
            is_ours = f"{MARK}={output}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if is_ours or any(name.startswith(str(output)) for name in names):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended in the meantime
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """A short demo, run to its end."""

    output: Path
    text: str
    maps: str
    """Libraries of the command's own process while it trained."""
    scraped: str
    """Last complete answer of the node's metrics."""
    spans: list[ReceivedSpan]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, unused_tcp_port_factory: Callable[[], int]) -> Run:
    """Runs the demo with all of an operator's options."""
    output, port = tmp_path_factory.mktemp("runs") / "demo", unused_tcp_port_factory()
    answers, ended = list[str](), threading.Event()
    scraper = threading.Thread(target=_scrape, args=(port, answers, ended))
    scraper.start()
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        try:
            with _demo(output, f"metrics.listen=127.0.0.1:{port}", 'track.to=["tensorboard"]') as process:
                lines, maps = _read_until(process, "step   1"), Path(f"/proc/{process.pid}/maps").read_text()
                text = lines + process.communicate(timeout=START_S)[0]
        finally:
            ended.set()
            scraper.join()
    assert process.returncode == 0, text
    # The last answer before services stopped: afterwards their figures are missing.
    scraped = max(reversed(answers), key=lambda text: text.count("# TYPE "))
    return Run(output, text, maps, scraped, receiver.spans)


def _scrape(port: int, answers: list[str], ended: threading.Event) -> None:
    while not ended.wait(1.0):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            answers.append(answer.read().decode())


def _read_until(process: subprocess.Popen[str], start: str) -> str:
    """Returns the output up to the line that begins with `start`."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            break
    return "".join(lines)


@pytest.mark.long
def test_ctrl_c_while_it_trains_leaves_nothing_and_the_run_is_resumed_on_the_same_path(tmp_path: Path) -> None:
    output, options = tmp_path / "demo", ['track.to=["tensorboard"]']
    with _demo(output, *options) as process:
        text = _read_until(process, f"step {SAVE_EVERY:>3}")  # one step more than is saved
        shared = shared_memory(list(_processes_of(output)))
        os.killpg(process.pid, signal.SIGINT)
        started = time.monotonic()
        try:
            text += process.communicate(timeout=STOP_S)[0]
        finally:
            process.kill()
    assert (process.returncode, time.monotonic() - started < limit_s(20)) == (130, True), text
    assert "Traceback" not in text and "nothing is lost; to continue: tasuki up" in text, text
    assert (_processes_of(output), left_of(shared), (output / "node" / "run").exists()) == ({}, [], False)

    resumed = subprocess.run(
        [sys.executable, "-m", "tasuki.cli", "train", output / "config.toml", "--resume", *_settings(*options)],
        cwd=output.parent, env=ENVIRONMENT, capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    # Steps may pass before the interrupt arrives.
    assert re.search(rf"version-0+(\d+): step \1 of {NUM_STEPS}\n", resumed.stderr), resumed.stderr
    assert [file.name for file in sorted((output / "samples").iterdir())] == SAMPLE_FILES
    with closing(sqlite3.connect(output / "journal.sqlite")) as journal:
        (num_changeovers,) = journal.execute("SELECT count(*) FROM changeovers").fetchone()
    # The steps after the checkpoint were made twice, and the interrupt may have come after another changeover.
    assert num_changeovers - 2 * (NUM_STEPS + 1) in range(2 * SAVE_EVERY + 2)
    assert json.loads((output / "track/tensorboard.json").read_text()) == {"last_step": NUM_STEPS}
    assert len(list((output / "track/tensorboard").glob("events.*"))) == 2


def test_the_command_trains_without_torch_in_its_own_process(run: Run):
    assert "libtorch" not in run.maps and "PyTorch" not in run.text


def test_the_summary_has_the_figures_and_the_score_has_risen(run: Run):
    summary = json.loads((run.output / "summary.json").read_text())
    assert summary["eval_score_before"] < 0.5
    assert summary["eval_score_after"] > summary["eval_score_before"] + 0.2
    assert summary["policy_version"] == summary["steps"] == NUM_STEPS
    # Two for each step, and two for the last evaluation and the export.
    assert summary["changeovers"] == 2 * (NUM_STEPS + 1)
    assert 0 < summary["log_prob_gap_max"] < 1e-3  # both compute in float32
    assert summary["seed"] == 0
    assert summary["seconds"] > 0
    assert not (run.output / "pending.json").exists()


def test_the_exported_model_reproduces_the_score_in_transformers(run: Run):
    rows = [json.loads(line) for line in (run.output / "task" / "eval.jsonl").read_text().splitlines()]
    after = json.loads((run.output / "summary.json").read_text())["eval_score_after"]
    assert _score(run.output / "model", rows) == pytest.approx(after, abs=0.02)


def test_curve_journal_and_checkpoint_are_there_and_nothing_goes_on(run: Run):
    assert (run.output / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((run.output / "checkpoints" / f"version-{NUM_STEPS:06d}").iterdir())
    with closing(sqlite3.connect(run.output / "journal.sqlite")) as journal:
        assert journal.execute("SELECT count(*) FROM changeovers").fetchone() == (2 * (NUM_STEPS + 1),)
    assert _processes_of(run.output) == {}
    assert not (run.output / "node" / "run").exists()


def test_a_scrape_of_the_running_node_has_every_metric_and_no_other(run: Run):
    families = {family.name: family for family in text_string_to_metric_families(run.scraped)}
    names = {f"{name}_total" if family.type == "counter" else name for name, family in families.items()}
    assert {name for name in names if not name.startswith("grpc_server_")} == {metric.name for metric in ALL}

    def labels(name: str, *wanted: str) -> set[tuple[str, ...]]:
        return {tuple(sample.labels[label] for label in wanted) for sample in families[name].samples}

    mapped = labels("tasuki_memory_mapped_bytes", "service", "tag")
    assert {("trainer", "weights"), ("trainer", "optimizer"), ("rollout", "weights"), ("rollout", "kv_cache")} <= mapped
    assert labels("tasuki_memory_planned_bytes", "service", "tag") & mapped
    # Where memory is short, nothing stays.
    staying = {
        (sample.labels["service"], sample.labels["tag"]): sample.value for sample in families["tasuki_memory_stays"].samples
    }
    assert staying.keys() == mapped and staying["trainer", "weights"] in (0, 2) and staying["rollout", "kv_cache"] in (0, 1)
    assert {("generate",), ("forward_backward",), ("optim_step",), ("changeover",)} <= labels("tasuki_gpu_seconds", "use")


def test_samples_have_the_trainers_log_probs_close_to_rollouts(run: Run):
    files = sorted((run.output / "samples").iterdir())
    assert [file.name for file in files] == SAMPLE_FILES
    lines = [json.loads(line) for line in files[-1].read_text().splitlines()]
    assert len(lines) == 64 * 8 and {line["policy_version"] for line in lines} == {NUM_STEPS - 1}
    lines = [line for line in lines if "token_ids" in line]
    assert len(lines) == 4 * 8
    step = json.loads((run.output / "metrics.jsonl").read_text().splitlines()[NUM_STEPS - 1])
    assert 0 < max(line["log_prob_gap_max"] for line in lines) <= step["metrics"]["log_prob_gap_max"] + 1e-8


def test_held_out_completions_explain_the_score(run: Run):
    scores = {
        step["step"]: step["eval_score"] for step in map(json.loads, (run.output / "metrics.jsonl").read_text().splitlines())
    }
    for file in (run.output / "evaluations").iterdir():
        rewards = [json.loads(line)["reward"] for line in file.read_text().splitlines()]
        assert sum(rewards) / len(rewards) == pytest.approx(scores.pop(int(file.stem.removeprefix("step-"))))
    assert set(scores.values()) == {None}


def test_logs_have_no_prompt(run: Run):
    shown = [json.loads(line) for file in (run.output / "samples").iterdir() for line in file.read_text().splitlines()]
    prompts = {line["prompt"] for line in shown if "prompt" in line}
    assert len(prompts) > NUM_STEPS and all(prompt.endswith(">") for prompt in prompts)
    logs = "".join(log.read_text() for log in (run.output / "logs").iterdir())
    assert "event=stage" in logs
    assert [prompt for prompt in prompts if prompt in logs] == []


def test_a_tracker_got_every_step(run: Run):
    assert json.loads((run.output / "track/tensorboard.json").read_text()) == {"last_step": NUM_STEPS}
    assert "tracker tensorboard" not in run.text


def test_a_step_is_one_trace_over_all_services(run: Run):
    by_id = {span.span_id: span for span in run.spans}
    for service, method in (
        ("rollout", "RolloutService/Generate"),
        ("trainer", "TrainerService/ForwardBackward"),
        ("trainer", "TrainerService/OptimStep"),
        ("coordinator", "CoordinatorService/Acquire"),
    ):
        name = f"tasuki.v1.{method}"
        served = [span for span in run.spans if (span.service, span.name) == (f"tasuki-{service}", name)]
        assert served, method
        for span in served:
            caller = by_id[span.parent_id]
            assert (caller.service, caller.name) == ("tasuki-client", name)
            assert caller.attributes["tasuki.request_id"] == span.attributes["tasuki.request_id"]
    for service in ("trainer", "rollout"):  # each at least one stage of both changeovers
        callers = [
            by_id[span.parent_id] for span in run.spans if span.service == f"tasuki-{service}" and span.parent_id in by_id
        ]
        assert any(caller.name.startswith("stage ") for caller in callers)
