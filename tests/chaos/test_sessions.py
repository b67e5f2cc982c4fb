"""Sessions of a gateway that are open through changeovers, while agents, services and the gateway itself are killed and stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasuki.client import Client, Phase, TrainingSample
from tests.chaos_node import samples_of
from tests.conftest import ENVIRONMENT, ROOT, RunningNode, assert_clean_audit, started_node
from tests.e2e.test_episodes import TEMPLATE
from tests.models import char_tokenizer
from tests.ports import free_port
from tests.pulses import pids

SEED = int(os.environ.get("TASUKI_STRIKES_SEED") or random.SystemRandom().randrange(2**31))
KEY = "0123456789abcdef" * 2
_SETTINGS = (
    "trainer.compute_dtype=float32",
    "rollout.dtype=float32",
    "rollout.max_running_requests=512",
    "rollout.engine.max_total_tokens=131072",
)
_REPORT = Path("runs/chaos/sessions.json")
_SERVICES = ("rollout", "scheduler0", "coordinator", "trainer0")
_STOPPED_S = 4.0
"""For so long the gateway and agents are stopped; the supervisor kills a service that is."""


class Crowd:
    """A gateway and the processes of its agents."""

    def __init__(self, node: RunningNode, folder: Path, *, num_turns: int) -> None:
        self.folder, self._listen = folder, f"127.0.0.1:{free_port()}"
        tokenizer = char_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(node.model)
        told = {"url": f"http://{self._listen}", "key": KEY, "num_turns": num_turns}
        (folder / "gateway.json").write_text(json.dumps(told))
        (folder / "key").touch(0o600)
        (folder / "key").write_text(KEY)
        self._config = node.config
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.start_gateway()

    def start_gateway(self) -> None:
        argv = [sys.executable, "-m", "tasuki.cli", "gateway", self._config, "--listen", self._listen]
        self.gateway = subprocess.Popen([*argv, "--key-file", self.folder / "key"], env=ENVIRONMENT, stdout=subprocess.PIPE)
        assert self.gateway.stdout is not None
        assert self.gateway.stdout.readline().startswith(b"OPENAI_BASE_URL")

    def start_agents(self, episodes: Iterable[str]) -> str:
        name = f"agents-{len(self.agents)}"
        argv = [sys.executable, ROOT / "tests/session_agents.py", self.folder, name, *episodes]
        self.agents[name] = subprocess.Popen(argv, env=ENVIRONMENT)
        return name

    def told(self, names: Iterable[str]) -> list[Mapping[str, Any]]:
        """What the agents have told; the last line of one that was killed may be incomplete."""
        lines: list[Mapping[str, Any]] = []
        for name in names:
            file = self.folder / f"{name}.jsonl"
            for line in file.read_text().splitlines() if file.exists() else ():
                with suppress(ValueError):
                    lines.append(json.loads(line))
        return lines

    def join(self) -> None:
        """Waits until the agents have ended their last episodes."""
        for process in self.agents.values():
            assert process.wait(600) in (0, -signal.SIGKILL)

    def end(self) -> None:
        for process in (self.gateway, *self.agents.values()):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextmanager
def crowd(folder: Path, *, num_turns: int = 4) -> Iterator[tuple[RunningNode, Client, Crowd]]:
    sys.stdout.write(f"TASUKI_STRIKES_SEED={SEED} repeats these strikes\n")
    with started_node(overrides=_SETTINGS) as node, Client(state_dir=node.state_dir) as client:
        made = Crowd(node, folder, num_turns=num_turns)
        try:
            yield node, client, made
        finally:
            made.end()


def changeover(client: Client, *, serves_s: float, during: Callable[[], None] | None = None) -> float:
    """To rollout and back, with an optimizer step that changes the version alone. Returns the seconds until the trainer had the GPUs."""
    client.acquire(Phase.ROLLOUT)
    time.sleep(serves_s)
    began = time.monotonic()
    if during is not None:
        client.begin_acquire(Phase.TRAIN)
        during()
    client.acquire(Phase.TRAIN)
    took_s = time.monotonic() - began
    client.forward_backward(samples_of(client.trainer_state().policy_version))
    client.optim_step(learning_rate=0.0)
    return took_s


def check(node: RunningNode, client: Client, crowd: Crowd, *, most: int) -> dict[str, Any]:
    """Lets the agents end, and repeats episodes without a fault. Every token must be the same, and trained once with its version."""
    client.acquire(Phase.ROLLOUT)
    (crowd.folder / "stop").touch()
    crowd.join()
    told = crowd.told(list(crowd.agents))
    ended = {(one["agent"], one["number"]): one for one in told if "turns" in one}
    spans = Counter[int]()
    for one in ended.values():
        (sample,) = one["samples"]
        drawn = sum(map(len, one["turns"]))
        versions = [span["policy_version"] for span in sample["version_spans"]]
        assert (sum(sample["loss_mask"]), sample["has_exact_log_probs"]) == (drawn, True)
        assert versions == sorted(versions)
        assert not versions or sum(span["num_tokens"] for span in sample["version_spans"]) == len(sample["loss_mask"])
        spans[len(versions)] += 1
    again = random.Random(SEED).sample(sorted(ended), min(most, len(ended)))
    names = [
        crowd.start_agents(f"{agent}/{number}" for agent, number in again[first : first + 100])
        for first in range(0, len(again), 100)
    ]
    crowd.join()
    repeated = crowd.told(names)
    assert sorted((one["agent"], one["number"]) for one in repeated) == sorted(again)
    for one in repeated:
        known = ended[one["agent"], one["number"]]
        assert (one["turns"], one["ends"]) == (known["turns"], known["ends"]), f"episode {one['agent']}/{one['number']}"
    assert client.rollout_state().num_running == 0, "requests of killed agents go on"
    samples = [sample_of(one) for key in again for one in ended[key]["samples"]]
    gaps = [
        np.abs(row - np.array(sample.rollout_log_probs))[np.array(sample.loss_mask) > 0].max()
        for sample, row in zip(samples, client.compute_log_probs(samples), strict=True)
    ]
    assert max(gaps) < 1e-4  # in float32
    assert_clean_audit(node.state_dir)
    ends = Counter(end for one in ended.values() for end in one["ends"])
    errors = Counter(one["error"] for one in told if "error" in one)
    report = {
        "log_prob_gap_max": float(max(gaps)),
        "episodes": len(ended),
        "repeated": len(again),
        "version_spans": dict(spans),
        "ends": dict(ends),
        "errors": dict(errors),
    }
    return {**report, "tokens": sum(map(len, (turn for one in ended.values() for turn in one["turns"])))}


def sample_of(told: Mapping[str, Any]) -> TrainingSample:
    names = "prompt_token_ids", "completion_token_ids", "rollout_log_probs", "loss_mask", "policy_version", "temperature"
    return TrainingSample(**{name: told[name] for name in names})


def write_report(name: str, report: Mapping[str, Any]) -> None:
    _REPORT.parent.mkdir(parents=True, exist_ok=True)
    told = json.loads(_REPORT.read_text()) if _REPORT.exists() else {}
    _REPORT.write_text(json.dumps({**told, name: {"seed": SEED, **report}}, indent=1) + "\n")
    sys.stdout.write(f"{name}: {json.dumps(report)}\n")


@pytest.mark.timeout(3600)
def test_five_hundred_sessions_are_open_through_a_hundred_changeovers_with_agents_killed(tmp_path: Path) -> None:
    random_, num_agents, num_kills, took = random.Random(SEED), 50, 0, list[float]()
    with crowd(tmp_path) as (node, client, made):
        running = {made.start_agents(map(str, range(first, first + num_agents))): first for first in range(0, 500, num_agents)}
        for number in range(50):
            took.append(changeover(client, serves_s=random_.uniform(0.1, 1.5)))
            if number % 5 == 4:
                killed = random_.choice(sorted(running))
                made.agents[killed].kill()
                first = 1000 * (number + 1) + running.pop(killed)
                running[made.start_agents(map(str, range(first, first + num_agents)))] = first
                num_kills += 1
        figures = {
            "changeovers": 2 * len(took),
            "kills": num_kills,
            "to_trainer_s_max": max(took),
            "to_trainer_s": sorted(took)[25],
        }
        report = check(node, client, made, most=500)
    write_report("agents", {**figures, **report})
    assert not report["errors"]


@pytest.mark.timeout(3600)
def test_sessions_outlive_services_and_a_gateway_that_are_killed_and_stopped(tmp_path: Path) -> None:
    random_ = random.Random(SEED)
    strikes = [(name, number, is_within) for name in (*_SERVICES, "gateway") for number in (signal.SIGKILL, signal.SIGSTOP)
               for is_within in (True, False)]  # fmt: skip
    random_.shuffle(strikes)
    with crowd(tmp_path) as (node, client, made):
        for first in (0, 20):
            made.start_agents(map(str, range(first, first + 20)))

        def strike(name: str, number: signal.Signals) -> None:
            time.sleep(random_.uniform(0, 0.3))
            if name != "gateway":
                (pid,) = pids(node.state_dir, name)
                os.kill(pid, number)
                return
            made.gateway.send_signal(number)
            if number is signal.SIGKILL:
                made.gateway.wait()
                made.start_gateway()
            else:
                time.sleep(_STOPPED_S)
                made.gateway.send_signal(signal.SIGCONT)

        told = list[tuple[str, str, str]]()
        for name, number, is_within in strikes:
            changeover(client, serves_s=1.0)
            client.acquire(Phase.ROLLOUT)
            time.sleep(random_.uniform(0.0, 0.5))
            if is_within:
                changeover(client, serves_s=0.2, during=lambda name=name, number=number: strike(name, number))
            else:
                strike(name, number)
                changeover(client, serves_s=1.0)
            told.append((name, number.name, "changeover" if is_within else "episode"))
        report = check(node, client, made, most=500)
        lost = [one for one in made.told(made.agents) if "error" in one]
    write_report("services", {"strikes": told, **report})
    num_gateways = sum(name == "gateway" and number is signal.SIGKILL for name, number, _ in strikes)
    assert all(one["is_lost"] for one in lost), "only what the killed gateway answered may fail"
    assert len(lost) <= 40 * 2 * num_gateways
