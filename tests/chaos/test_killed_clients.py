"""Runs whose client is killed two hundred times at random, on living nodes and on new ones, and once at each call. Takes an hour."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRONMENT, NOTHING_STAYS, ROOT, RunningNode, assert_clean_audit, started_node, tasuki
from tests.killed_client import RL, SFT, Run, write_task

SEED = int(os.environ.get("TASUKI_STRIKES_SEED") or random.SystemRandom().randrange(2**31))
NUM_KILLS = 10
_STEPS_OF_A_LIFE = 1.2
"""At most, from the client's first call on; in the seconds of the undisturbed run."""
_REPORT = Path("runs/chaos/killed_clients.json")
_GRPO = {**RL, "train.num_steps": 7}
_EPOCHS = {**_GRPO, "train.num_epochs": 2, "train.num_mini_batches": 3, "train.loss.kl_coef": 0.05}
_DAPO = {**_GRPO, "train.algorithm": "dapo", "train.max_batches": 2, "train.num_mini_batches": 2}
_PPO = {**_EPOCHS, "train.algorithm": "ppo", "train.critic_warmup_steps": 2}
_EPISODES = {**_GRPO, "train.episode.function": "odd_reward:two_turns"}
del _EPISODES["train.reward.function"]
_SFT = {**SFT, "sft.num_steps": 12}
_CARRIED = {**_GRPO, "train.oversample": 2.0, "train.max_staleness": 1, "train.max_new_tokens": 200}
_EPISODE = """
async def solve(policy, prompt):
    first = await policy.generate(await policy.encode(prompt))
    second = await policy.generate([*first.context, *await policy.encode("b")])
    return float(len(set(second.token_ids)) % 2)
"""
_LONG_SAMPLE = 12
"""Tokens beyond which no two samples are equal by chance."""
SERIES: Mapping[str, tuple[str, Sequence[Mapping[str, object]]]] = {
    "critic": ("[trainer.critic]\nlearning_rate = 1e-3\n", [_PPO] * 4),
    "whole": ("", [_GRPO, _SFT, _EPOCHS, _DAPO, _EPISODES] * 2),
    "lora": ("[trainer.lora]\nrank = 4\n", [_GRPO, _SFT, _EPOCHS, _DAPO] * 2),
    "carry": (
        "",
        [
            _CARRIED,
            {**_CARRIED, "train.oversample": 1.4, "train.max_staleness": 2, "train.save_every": 1},
            {**_CARRIED, "train.num_mini_batches": 2, "train.max_staleness": 5},
        ],
    ),
}
"""Tables of the node, and the runs that follow each other on it: each begins with the weights of the one before."""


def restart(node: RunningNode, *options: str) -> None:
    """Ends the node and starts another one in its place."""
    stopped = tasuki("down", node.config, timeout_s=120)
    assert stopped.returncode == 0, stopped.stderr
    node.up.wait(60)
    argv = [sys.executable, "-m", "tests.up", "up", str(node.config), *options]
    environment = {**ENVIRONMENT, "CHOICES": json.dumps(NOTHING_STAYS)}
    started = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert started.returncode == 0, started.stderr


@contextmanager
def runs_of(name: str, folder: Path, kind: str) -> Iterator[tuple[RunningNode, list[Run]]]:
    tables, settings = SERIES[name]
    with started_node(tables=tables) as node:
        yield node, [Run(node.config, folder, f"{kind}-{number}", each) for number, each in enumerate(settings)]


def kill(node: RunningNode, run: Run, *, step_s: float, draw: random.Random) -> dict[str, Any]:
    """Trains to the end over at most NUM_KILLS deaths of the client, two of which the node does not survive. Returns where they fell.

    step_s: of the undisturbed run.
    """
    fell: list[float] = []
    life_s = _STEPS_OF_A_LIFE * step_s
    ended = run.live(dies_after_s=draw.uniform(0, life_s))
    starts = dict(zip(draw.sample(range(1, NUM_KILLS), 2), ((), ("--resume",)), strict=True))
    for number in range(1, NUM_KILLS + 1):
        if ended:
            break
        fell.append(num_lines(run))
        if number in starts and (starts[number] or any(run.output_dir.glob("checkpoints/*/loop.json"))):
            restart(node, *starts[number])
        ended = run.live("--resume", dies_after_s=None if number == NUM_KILLS else draw.uniform(0, life_s))
    return {"run": run.output, "kills_after_lines": fell}


def num_lines(run: Run) -> int:
    path = run.output_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.timeout(7200)
def test_a_client_killed_at_each_call_of_ppo_leaves_every_figure_and_every_tensor_as_it_is(tmp_path: Path) -> None:
    write_task(tmp_path)
    short = {"num_steps": 2, "critic_warmup_steps": 1, "num_epochs": 1, "num_mini_batches": 2}
    settings = {**_PPO, **{f"train.{name}": value for name, value in short.items()}}
    with started_node(tables=SERIES["critic"][0]) as node:
        whole = Run(node.config, tmp_path, "whole", settings)
        assert whole.live()
    with started_node(tables=SERIES["critic"][0]) as node:
        killed = Run(node.config, tmp_path, "killed", settings)
        num_lives = 1
        while not killed.live(*["--resume"][: num_lives - 1], dies_at_new_calls=True):
            num_lives += 1
        assert killed.figures() == whole.figures()
        assert killed.results() == whole.results()
        assert_clean_audit(node.state_dir)
    calls = json.loads(killed.calls.read_text())
    assert num_lives > len(calls), "calls that ended no life"
    assert {"Generate", "ForwardBackward", "OptimStep", "SaveCheckpoint", "Acquire"} <= {name.split()[0] for name in calls}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [name for name in SERIES if name != "carry"])
def test_clients_killed_at_random_times_leave_every_figure_and_every_tensor_as_it_is(name: str, tmp_path: Path) -> None:
    sys.stdout.write(f"TASUKI_STRIKES_SEED={SEED} repeats these kills\n")
    write_task(tmp_path)
    with runs_of(name, tmp_path, "whole") as (_, whole):
        assert all(run.live() for run in whole)
    report: list[dict[str, Any]] = []
    draw = random.Random(f"{SEED} {name}")
    try:
        with runs_of(name, tmp_path, "killed") as (node, killed):
            for run, expected in zip(killed, whole, strict=True):
                report.append(kill(node, run, step_s=expected.step_seconds(), draw=draw))
                assert run.figures() == expected.figures()
                assert run.results() == expected.results()
            assert_clean_audit(node.state_dir)
        assert sum(len(each["kills_after_lines"]) for each in report) >= len(killed) * NUM_KILLS // 2, "killed too seldom"
    finally:
        write_report(name, report)


def write_report(name: str, report: Sequence[Mapping[str, Any]]) -> None:
    _REPORT.parent.mkdir(parents=True, exist_ok=True)
    told = json.loads(_REPORT.read_text()) if _REPORT.exists() else {}
    num_kills = sum(each.get("num_kills", len(each.get("kills_after_lines", ()))) for each in report)
    told[name] = {"seed": SEED, "num_kills": num_kills, "runs": report}
    _REPORT.write_text(json.dumps(told, indent=1) + "\n")


@pytest.mark.timeout(7200)
def test_clients_killed_with_carried_groups_leave_what_a_whole_run_gives_with_the_same_samples(tmp_path: Path) -> None:
    """Where a changeover cuts depends on time, and so do the engine's batches, in whose order it adds."""
    sys.stdout.write(f"TASUKI_STRIKES_SEED={SEED} repeats these kills\n")
    write_task(tmp_path)
    draw = random.Random(f"{SEED} carry")
    with runs_of("carry", tmp_path, "killed") as (node, killed):
        first, *others = killed
        assert first.live()
        # A killed client's generation is lost, so that a life must last for more than one.
        report = [kill(node, run, step_s=2 * first.step_seconds(), draw=draw) for run in others]
        assert_clean_audit(node.state_dir)
    write_report("carry", report)
    steps = [step["metrics"] for run in killed for step in run.figures()]
    assert sum(metrics.get("carried_tokens", 0) for metrics in steps), "no token was carried"
    with runs_of("carry", tmp_path, "whole") as (_, whole):
        for run, expected in zip(whole, killed, strict=True):
            assert replace(run, repeats=expected.output).live()
            assert run.figures() == expected.figures()
            assert run.results() == expected.results()


@pytest.mark.timeout(3600)
def test_a_loop_of_episodes_killed_at_random_times_trains_each_once_and_says_how_many_begin_again(tmp_path: Path) -> None:
    sys.stdout.write(f"TASUKI_STRIKES_SEED={SEED} repeats these kills\n")
    (write_task(tmp_path) / "turns.py").write_text(_EPISODE)
    draw = random.Random(f"{SEED} episodes")
    settings = {name: value for name, value in _CARRIED.items() if "reward" not in name} | {"train.max_new_tokens": 60}
    with started_node() as node:
        first, run = (
            Run(node.config, tmp_path, name, {**settings, "train.episode.function": "turns:solve"})
            for name in ("first", "episodes")
        )
        began = time.monotonic()
        assert first.live()
        life_s, num_kills = time.monotonic() - began, 0
        ended = run.live(dies_after_s=draw.uniform(0.2, 0.7) * life_s)
        while not ended:
            num_kills += 1
            ended = run.live("--resume", dies_after_s=None if num_kills == NUM_KILLS else draw.uniform(0.2, 0.7) * life_s)
        assert_clean_audit(node.state_dir)
    told = re.findall(r"(\d+) open episodes? begins? again", (tmp_path / "episodes.log").read_text())
    write_report("episodes", [{"run": run.output, "num_kills": num_kills, "begin_again": told}])
    assert num_kills and told
    assert [step["step"] for step in run.figures()] == list(range(8))
    files = sorted((run.output_dir / "samples").iterdir())
    assert [file.name for file in files] == [f"step-{step:06d}.jsonl" for step in range(7)]
    samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    drawn = [tuple(one["token_ids"]) for one in samples if len(one.get("token_ids") or ()) > _LONG_SAMPLE]
    assert len(drawn) == len(set(drawn)) > 0, "trained twice"
