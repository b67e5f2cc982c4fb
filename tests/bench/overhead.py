"""What it costs a run to be watched: a loop with everything on beside the same loop with everything off, by turns.

On is metrics that are scraped, the sample dump, a tracker, a dashboard with an open page, and tracing to a receiver. Two nodes stay up,
one for each side, each with one run that is stopped while it is the other's turn. CPU seconds are those of all processes of the node, of
the run and of the dashboard. On a CPU it is the demo; on a GPU a model of 0.36 billion parameters, at random, on the demo's task.

Usage: python -m tests.bench.overhead --out runs/bench [--pairs 24] [--steps 8] [--limit-s 450] [--without tracing,tracker]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from tests.bench.overhead_side import CLI, LIMIT_S, Side, Turn
from tests.bench.processes import REPOSITORY, tied
from tests.ports import free_port

DEMO = REPOSITORY / "client" / "examples" / "demo"
SCRAPE_S, PAGE_S = 5.0, 2.0
PAGE_PARTS = ("node", "run", "curves", "changeovers")
PARTS = ("metrics", "samples", "tracker", "dashboard", "tracing")
_WARM_STEPS = 3
_ENDLESS = 1_000_000
# Weights stay as they are, so that all steps are alike.
_SETTINGS = [
    "trainer.learning_rate=1e-9",
    f"trainer.total_steps={_ENDLESS}",
    f"train.num_steps={_ENDLESS}",
    f"train.eval_every={_ENDLESS}",
]
_GPU_SETTINGS = [
    'device="cuda"',
    "trainer.num_ranks=1",
    'trainer.compute_dtype="bfloat16"',
    'rollout.dtype="bfloat16"',
    'rollout.attention_backend="triton"',
    'rollout.sampling_backend="pytorch"',
    "rollout.context_length=128",
    "rollout.kv_tokens=65536",
    "trainer.micro_batch_tokens=8192",
    "train.max_new_tokens=64",
]
_GPU_MODEL = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_REWARD = "def exact(*, completion: str) -> float:\n    return sum(map(ord, completion)) % 7 / 7\n"


@contextmanager
def polled(urls: Sequence[str], side: Side, *, every_s: float) -> Iterator[None]:
    """Reads the addresses while it is the side's turn."""
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(every_s):
            for url in urls if side.is_its_turn else ():
                urllib.request.urlopen(url, timeout=LIMIT_S).read()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def shown(side: Side) -> Iterator[None]:
    """A dashboard that follows the node's runs, and a page that asks for its parts."""
    url = f"http://127.0.0.1:{free_port()}"
    argv = [*CLI, "dashboard", "--config", str(side.config), "--listen", url.removeprefix("http://")]
    with (side.folder / "dashboard.log").open("wb") as log:
        side.dashboard = subprocess.Popen(tied(argv), cwd=REPOSITORY, stdout=log, stderr=log)
    try:
        _await_page(url, side.dashboard)
        with polled([f"{url}/api/{part}" for part in PAGE_PARTS], side, every_s=PAGE_S):
            yield
    finally:
        side.dashboard.terminate()
        side.dashboard.wait(LIMIT_S)


def _await_page(url: str, dashboard: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).read()
            return
        except OSError:
            if dashboard.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def make_task(folder: Path) -> None:
    """The demo's; on a GPU with a larger model."""
    subprocess.run([sys.executable, DEMO / "make_task.py", folder, "--seed", "0"], cwd=REPOSITORY, check=True)
    if not torch.cuda.is_available():
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "model")
    config.update(_GPU_MODEL)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")


def make_side(folder: Path, task: Path, overrides: Sequence[str]) -> Side:
    folder.mkdir(parents=True)
    config = (REPOSITORY / "deploy" / "config" / "demo.toml").read_text()
    ends = "stop_at_eval_score = 0.985\n"
    assert config.count(ends) == 1
    # The dashboard takes no settings but the file's.
    (folder / "config.toml").write_text(f"{config.replace(ends, '')}\n[security]\ninsecure = true\n")
    (folder / "reward.py").write_text(_REWARD)
    shutil.copytree(task, folder / "task")
    gpu = _GPU_SETTINGS if torch.cuda.is_available() else []
    return Side(folder, [*_SETTINGS, *gpu, f"train.output_dir={folder / 'run'}", *overrides])


@contextmanager
def watched(folder: Path, parts: Sequence[str]) -> Iterator[tuple[Side, Callable[[], int]]]:
    """The side that is watched, its node up, and the number of spans that have come."""
    with ExitStack() as stack:
        overrides = [] if "samples" in parts else ["train.samples.groups_per_step=0"]
        count: Callable[[], int] = int
        if "tracing" in parts:
            from tests.otlp import receiving  # needs the extra

            receiver = stack.enter_context(receiving())
            overrides.append(f"telemetry.endpoint={receiver.endpoint}")
            count = lambda: len(receiver.spans)  # noqa: E731
        if "tracker" in parts:
            overrides.append('track.to=["tensorboard"]')
        metrics = f"127.0.0.1:{free_port()}"
        if "metrics" in parts:
            overrides.append(f"metrics.listen={metrics}")
        side = make_side(folder / "on", folder / "task", overrides)
        stack.enter_context(side.up())
        if "metrics" in parts:
            stack.enter_context(polled([f"http://{metrics}/metrics"], side, every_s=SCRAPE_S))
        if "dashboard" in parts:
            stack.enter_context(shown(side))
        yield side, count


def measure(folder: Path, *, parts: Sequence[str], num_pairs: int, num_steps: int, limit_s: float) -> dict[str, object]:
    """limit_s: no pair is begun that would end later."""
    started = time.monotonic()
    make_task(folder / "task")
    with ExitStack() as stack:
        off = make_side(folder / "off", folder / "task", ["train.samples.groups_per_step=0"])
        stack.enter_context(off.up())
        on, num_spans = stack.enter_context(watched(folder, parts))
        for side in (off, on):
            stack.enter_context(side.training(warm_steps=_WARM_STEPS))
        pairs: list[tuple[Turn, Turn]] = []
        found: dict[str, object] = {}
        pair_s = 0.0
        while len(pairs) < num_pairs and time.monotonic() - started + pair_s < limit_s:
            begun = time.monotonic()
            # The first of a pair is now the one, now the other: a machine that warms up favours neither.
            turns = {side.folder.name: side.take_turn(num_steps) for side in ((off, on) if len(pairs) % 2 else (on, off))}
            pairs.append((turns["off"], turns["on"]))
            pair_s = max(pair_s, time.monotonic() - begun)
            found = {
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "parts": list(parts),
                **report(pairs),
                "steps_a_turn": num_steps,
                "num_spans": num_spans(),
                "seconds": time.monotonic() - started,
            }
            # A bench that is cut off has told what it had.
            (folder / "overhead.json").write_text(json.dumps(found, indent=2) + "\n")
        return found


def report(pairs: Sequence[tuple[Turn, Turn]]) -> dict[str, object]:
    """A step on each side, and by how many percent a watched turn costs more than the other one of its pair."""
    sides = {"off": [off for off, _ in pairs], "on": [on for _, on in pairs]}
    names = sorted({name for turns in sides.values() for turn in turns for name in turn.step_cpu_s})
    return {
        "step_s": {side: _spread([turn.step_s for turn in turns]) for side, turns in sides.items()},
        "step_cpu_s": {side: _spread([turn.total_cpu_s for turn in turns]) for side, turns in sides.items()},
        "more_step_s_percent": _spread([100 * (on.step_s / off.step_s - 1) for off, on in pairs]),
        "more_step_cpu_s_percent": _spread([100 * (on.total_cpu_s / off.total_cpu_s - 1) for off, on in pairs]),
        "step_cpu_s_by_process": {
            name: {side: statistics.median(turn.step_cpu_s.get(name, 0.0) for turn in turns) for side, turns in sides.items()}
            for name in names
        },
        "num_pairs": len(pairs),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "quarter": quarters[0],
        "three_quarters": quarters[2],
        "least": min(values),
        "greatest": max(values),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--limit-s", type=float, default=450.0, help="no pair is begun that would end later")
    parser.add_argument("--without", default="", help=f"parts to leave off, of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    left_off = [part for part in arguments.without.split(",") if part]
    if not set(left_off) <= set(PARTS):
        parser.error(f"--without: give some of {', '.join(PARTS)}")
    folder = (arguments.out / "overhead").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = measure(
        folder,
        parts=[part for part in PARTS if part not in left_off],
        num_pairs=arguments.pairs,
        num_steps=arguments.steps,
        limit_s=arguments.limit_s,
    )
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
