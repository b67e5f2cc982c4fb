"""Cost of observing a run: a loop with all observation on, in turns with the same loop without any.

A watched loop has its metrics scraped, dumps samples, feeds a tracker and has a dashboard with an open page. Each side has a node and a run
on it that waits while the other side has its turn. Both make the same steps. CPU seconds include all processes of the node, the run and the
dashboard. The task is the demo, or the arithmetic of `make example`, which needs `make .example/.installed`.

Usage: python -m tools.bench.overhead --out runs/bench [--task demo] [--rounds 24] [--steps 8] [--limit-s 450]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.ports import free_port
from tools.bench.overhead_side import CLI, LIMIT_S, Side, Turn, all_up
from tools.bench.overhead_tasks import Task, task_named
from tools.bench.pairs import paired, spread
from tools.bench.processes import REPOSITORY, tied

SCRAPE_S = 15.0
"""Scrape interval; the same as in deploy/prometheus."""
PAGE = {2.0: ("node", "run"), 5.0: ("curves", "changeovers")}
"""Parts that an open page requests, by interval in seconds: head, and charts."""
_WARM_STEPS = 3


@contextmanager
def polled(urls: Sequence[str], side: Side, *, every_s: float) -> Iterator[None]:
    """Reads the addresses while the side has its turn."""
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
    """Opens a dashboard that follows the node's runs, and a page that requests its parts."""
    url = f"http://127.0.0.1:{free_port()}"
    argv = [*CLI, "dashboard", "--config", str(side.config), "--listen", url.removeprefix("http://")]
    with (side.folder / "dashboard.log").open("wb") as log:
        side.dashboard = subprocess.Popen(tied(argv), cwd=REPOSITORY, stdout=log, stderr=log)
    try:
        _await_page(url, side.dashboard)
        with ExitStack() as page:
            for every_s, parts in PAGE.items():
                page.enter_context(polled([f"{url}/api/{part}" for part in parts], side, every_s=every_s))
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


@dataclass
class Watch:
    """Observers of one side. Its node need not be up yet."""

    side: Side
    metrics: str
    is_on: bool

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Scrapes, and keeps a page open, while the side has its turn."""
        with ExitStack() as stack:
            if self.is_on:
                stack.enter_context(polled([f"http://{self.metrics}/metrics"], self.side, every_s=SCRAPE_S))
                stack.enter_context(shown(self.side))
            yield


def watch_of(folder: Path, name: str, *, is_on: bool, task: Task) -> Watch:
    metrics = f"127.0.0.1:{free_port()}"
    watched = ['track.to=["tensorboard"]', f"metrics.listen={metrics}"]
    overrides = watched if is_on else ["train.samples.groups_per_step=0"]
    settings = task.write_side(folder / name, task=folder / "task")
    return Watch(Side(folder / name, [*settings, *overrides], dict(os.environ)), metrics, is_on)


def measure(folder: Path, *, task: Task, num_rounds: int, num_steps: int, limit_s: float) -> dict[str, object]:
    """Measures both sides in turns. limit_s: no round begins that would end later."""
    started = time.monotonic()
    task.make(folder / "task")
    with ExitStack() as stack:
        watches = {name: watch_of(folder, name, is_on=name == "watched", task=task) for name in ("off", "watched")}
        stack.enter_context(all_up([watch.side for watch in watches.values()]))
        for watch in watches.values():
            stack.enter_context(watch.side.training())
        for watch in watches.values():
            stack.enter_context(watch.looking())
            watch.side.warm_up(_WARM_STEPS)
        ready_s = time.monotonic() - started
        rounds: list[dict[str, Turn]] = []
        found: dict[str, object] = {}
        round_s = 0.0
        while len(rounds) < num_rounds and time.monotonic() - started + round_s < limit_s:
            begun = time.monotonic()
            # Alternate the order: a machine that warms up favours no side.
            order = list(watches) if len(rounds) % 2 else list(reversed(watches))
            rounds.append({name: watches[name].side.take_turn(num_steps) for name in order})
            round_s = max(round_s, time.monotonic() - begun)
            found = {
                "device": task.device,
                **report(rounds),
                "steps_a_turn": num_steps,
                "ready_s": ready_s,
                "seconds": time.monotonic() - started,
            }
            # Written after every round, so that an interrupted benchmark still reports.
            (folder / "overhead.json").write_text(json.dumps(found, indent=2) + "\n")
        return found


def report(rounds: Sequence[Mapping[str, Turn]]) -> dict[str, object]:
    """Seconds of a step on each side, and by how many percent a step costs more than one of "off" in the same round.

    rounds: seconds and CPU seconds of a step, in each turn. On a shared machine, the speed of its cores varies from step to step, and both
    with it: "at_equal_work_cpu" compares the seconds of a step for each CPU second of the processes that do a step's work.
    """
    sides = {name: [turns[name] for turns in rounds] for name in rounds[0]}
    services = sorted({service for turns in sides.values() for turn in turns for service in turn.step_cpu_s})

    def more(of: Callable[[Turn], float]) -> dict[str, object]:
        watched = [name for name in sides if name != "off"]
        return {name: paired([100 * (of(turns[name]) / of(turns["off"]) - 1) for turns in rounds]) for name in watched}

    return {
        "step_s": {name: spread([turn.step_s for turn in turns]) for name, turns in sides.items()},
        "step_cpu_s": {name: spread([turn.total_cpu_s for turn in turns]) for name, turns in sides.items()},
        "more_step_s_percent": more(lambda turn: turn.step_s),
        "more_step_s_percent_at_equal_work_cpu": more(lambda turn: turn.step_s / turn.work_cpu_s),
        "more_step_cpu_s_percent": more(lambda turn: turn.total_cpu_s),
        "step_cpu_s_by_process": {
            service: {
                name: statistics.fmean(turn.step_cpu_s.get(service, 0.0) for turn in turns) for name, turns in sides.items()
            }
            for service in services
        },
        "num_rounds": len(rounds),
        "rounds": [{name: asdict(turn) for name, turn in turns.items()} for turns in rounds],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--task", choices=("demo", "arithmetic"), default="demo")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--limit-s", type=float, default=450.0, help="no round is begun that would end later")
    arguments = parser.parse_args()
    folder = (arguments.out / "overhead").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = measure(
        folder,
        task=task_named(arguments.task),
        num_rounds=arguments.rounds,
        num_steps=arguments.steps,
        limit_s=arguments.limit_s,
    )
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
