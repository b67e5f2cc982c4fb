"""What it costs a run to be watched: the demo's loop with everything on beside the same loop with everything off, in turns.

On is metrics that are scraped, the sample dump, a tracker, a dashboard with an open page, and tracing to a receiver. Two nodes stay up, one
for each side, and each in turn carries out a short run. CPU seconds are those of all processes of the node, the run and the dashboard.

Usage: python -m tests.bench.overhead --out runs/bench [--pairs 6] [--steps 20]
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tasuki.config.lock import NODE_LOCK, holder
from tests.bench.processes import REPOSITORY, tied
from tests.otlp import receiving
from tests.ports import free_port

CLI = [sys.executable, "-m", "tasuki.cli"]
DEMO = REPOSITORY / "client" / "examples" / "demo"
SCRAPE_S, PAGE_S = 5.0, 2.0
PAGE_PARTS = ("node", "run", "curves", "changeovers")
LIMIT_S = 300.0
_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """One short run. Seconds of each step but the first, and CPU seconds a step over the same steps."""

    step_s: list[float]
    cpu_s: float


@dataclass
class Side:
    """A node, with everything on or off. dashboard: its process."""

    folder: Path
    overrides: list[str]
    dashboard: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    def run(self, number: int, *, num_steps: int) -> Segment:
        output = self.folder / f"run-{number}"
        settings = [f"train.output_dir={output}", f"train.num_steps={num_steps}", f"train.eval_every={num_steps}"]
        argv = [*CLI, "train", str(self.config), "--no-start", *_set([*settings, *self.overrides])]
        with (self.folder / f"train-{number}.log").open("wb") as log:
            train = subprocess.Popen(tied(argv), cwd=REPOSITORY, stdout=log, stderr=log)
        moments = list(self._steps(output / "metrics.jsonl", train, num_steps=num_steps))
        if train.wait(LIMIT_S) != 0 or len(moments) < 2:
            raise RuntimeError(Path(log.name).read_text()[-2000:])
        step_s = [(at - before) / (step - last) for (last, before, _), (step, at, _) in itertools.pairwise(moments)]
        (first, _, cpu_then), (last, _, cpu_now) = moments[0], moments[-1]
        return Segment(step_s, (cpu_now - cpu_then) / (last - first))

    def _steps(self, metrics: Path, train: subprocess.Popen[bytes], *, num_steps: int) -> Iterator[tuple[int, float, float]]:
        """Steps that have ended, with time and CPU seconds so far, whenever there are more."""
        seen = 0
        while seen < num_steps:
            if train.poll() is not None:
                return
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if lines > seen:
                seen = min(lines, num_steps)  # a held-out score at the end has another line
                yield seen, time.perf_counter(), self._cpu_s(train.pid)
            time.sleep(0.005)

    def _cpu_s(self, train_pid: int) -> float:
        pids = [train_pid, holder(self.folder / "node", name=NODE_LOCK)]
        if self.dashboard is not None:
            pids.append(self.dashboard.pid)
        total = 0.0
        for pid in pids:
            assert pid is not None, "the node has ended"
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                try:
                    total += sum(process.cpu_times()[:4])  # user, system, and those of children that have ended
                except psutil.NoSuchProcess:
                    continue
        return total


def _set(overrides: Sequence[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


@contextmanager
def serving(side: Side) -> Iterator[None]:
    subprocess.run([*CLI, "up", str(side.config), *_set(side.overrides)], cwd=REPOSITORY, check=True)
    try:
        yield
    finally:
        subprocess.run([*CLI, "down", str(side.config)], cwd=REPOSITORY, check=False)


@contextmanager
def polled(url: str, *, every_s: float) -> Iterator[None]:
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(every_s):
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
    port = free_port()
    argv = [*CLI, "dashboard", "--config", str(side.config), "--listen", f"127.0.0.1:{port}"]
    with (side.folder / "dashboard.log").open("wb") as log, ExitStack() as pages:
        side.dashboard = subprocess.Popen(tied(argv), cwd=REPOSITORY, stdout=log, stderr=log)
        try:
            pages.callback(side.dashboard.terminate)
            _await_page(f"http://127.0.0.1:{port}/", side.dashboard)
            for part in PAGE_PARTS:
                pages.enter_context(polled(f"http://127.0.0.1:{port}/api/{part}", every_s=PAGE_S))
            yield
        finally:
            pages.close()
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


def make_side(folder: Path, task: Path, overrides: list[str]) -> Side:
    folder.mkdir(parents=True)
    shutil.copy(REPOSITORY / "deploy" / "config" / "demo.toml", folder / "config.toml")
    shutil.copy(DEMO / "reward.py", folder)
    shutil.copytree(task, folder / "task")
    # A run ends after its steps, and not for its score.
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("stop_at_eval_score = 0.985\n", ""))
    return Side(folder, overrides)


def measure(folder: Path, *, num_pairs: int, num_steps: int) -> dict[str, object]:
    subprocess.run([sys.executable, DEMO / "make_task.py", folder / "task", "--seed", "0"], cwd=REPOSITORY, check=True)
    metrics = free_port()
    with receiving() as receiver, ExitStack() as stack:
        off = make_side(folder / "off", folder / "task", ["train.samples.groups_per_step=0"])
        watching = [
            f"metrics.listen=127.0.0.1:{metrics}",
            f"telemetry.endpoint={receiver.endpoint}",
            'track.to=["tensorboard"]',
            "security.insecure=true",
        ]
        on = make_side(folder / "on", folder / "task", watching)
        config = on.config.read_text()
        on.config.write_text(f"{config}\n[security]\ninsecure = true\n")
        for side in (off, on):
            stack.enter_context(serving(side))
        stack.enter_context(polled(f"http://127.0.0.1:{metrics}/metrics", every_s=SCRAPE_S))
        stack.enter_context(shown(on))
        for side in (off, on):
            side.run(0, num_steps=_WARM_STEPS)
        pairs: list[tuple[Segment, Segment]] = []
        found: dict[str, object] = {}
        for number in range(1, num_pairs + 1):
            # The first of a pair is now the one, now the other: a machine that warms up favours neither.
            if number % 2:
                pairs.append((off.run(number, num_steps=num_steps), on.run(number, num_steps=num_steps)))
            else:
                later = on.run(number, num_steps=num_steps)
                pairs.append((off.run(number, num_steps=num_steps), later))
            found = {**report(pairs), "num_spans": len(receiver.spans), "num_steps": num_steps}
            # A bench that is cut off has told what it had.
            (folder / "overhead.json").write_text(json.dumps(found, indent=2) + "\n")
        return found


def report(pairs: Sequence[tuple[Segment, Segment]]) -> dict[str, object]:
    """Medians of a step, and the ratio of on to off in each pair."""
    sides = {"off": [off for off, _ in pairs], "on": [on for _, on in pairs]}
    steps = {name: [second for segment in segments for second in segment.step_s] for name, segments in sides.items()}
    return {
        "step_s": {name: _spread(seconds) for name, seconds in steps.items()},
        "step_cpu_s": {name: _spread([segment.cpu_s for segment in segments]) for name, segments in sides.items()},
        "ratio_of_step_s": _spread([statistics.median(on.step_s) / statistics.median(off.step_s) for off, on in pairs]),
        "ratio_of_step_cpu_s": _spread([on.cpu_s / off.cpu_s for off, on in pairs]),
        "num_pairs": len(pairs),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    folder = (arguments.out / "overhead").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = measure(folder, num_pairs=arguments.pairs, num_steps=arguments.steps)
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
