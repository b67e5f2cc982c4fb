"""Whole changeovers of a node: `python -m tools.bench.changeover_gpu [--out FOLDER] [--size qwen2.5-7b] [--gpus N] [--kv needed most ...]
[--settled] [--set A.B=VALUE]`.

A node with random weights, float32 masters, N trainer ranks and N replicas, started once per size of the KV cache. After a batch of 512
samples (64 x 8, 256 + 512 tokens) and a training step, each round goes from the end of an optimizer step to the first token. Then it goes
from the last token of a shorter batch (192 tokens a sample) back to TRAIN. Every other round first waits for the optimizer's kernels, which
OptimStep does not ("settled"). With --settled every round does, and generates a second such batch: "speed_ratio" is the rate of the first,
right after the changeover, relative to the second. "unused_at_most_ms" is the time until the first token, and from the last token until
the trainer has computed the log-probs of one sample. Both calls are then repeated. Without the time of the repetitions it is "unused_ms",
which neither service uses.

Beside the seconds of every stage, the result has the bytes that it moved, the driver's figure for the first GPU after each stage, each
tag's mapped bytes, the planner's prediction, and the verdict of `tasuki audit`. Rounds stop once --limit-s is over, counted from the start
of a node.

--kv "needed" bounds the cache by a step's samples, "most" by kv_ratio alone. --tiny: a small model on a CPU.
Writes changeover_gpu.json after each round, and prints a table.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tasuki.client import Client, Phase, SamplingParams
from tasuki.client.types import Stage, StageEvent
from tasuki.config.load import load_config
from tasuki.config.paths import node_targets
from tasuki.config.schema import NodeConfig
from tasuki.node.start import start_node
from tasuki.planner.choose import plan_node
from tasuki.planner.node import GB
from tasuki.planner.residency import expected_seconds
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import memory_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.memory_pb2_grpc import MemoryServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.stages import RING, MemoryTag
from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.node_load import GPU, TINY, Load, make_model
from tools.bench.plan_gpu import SIZES

STAGE_LIMIT_S, SETTLE_S = 300.0, 0.3
THERE = ("to_rollout_ms", "to_first_token_ms", "same_token_again_ms")
BACK = ("to_train_ms", "to_first_log_probs_ms", "same_log_probs_again_ms")
"""The time to the log-probs is an upper bound of that to the first kernel of training."""
UNUSED = ("unused_ms", "unused_at_most_ms")
RATIO = "speed_ratio"


def taken_bytes(device: str) -> int:
    """Returns the bytes in use on the first visible GPU, as the driver reports them; 0 on a CPU."""
    if device == "cpu":
        return 0
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    first = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    return nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(first)).used


def stages_ms(events: Sequence[StageEvent]) -> dict[str, float]:
    return {stage: round(1000 * event.seconds, 2) for event in events if (stage := Stage.of(event.stage)) and event.seconds}


def stages_gb(events: Sequence[StageEvent]) -> dict[str, float]:
    """Returns the GB that each stage moved, over all ranks."""
    return {stage: round(event.bytes / GB, 3) for event in events if (stage := Stage.of(event.stage)) and event.bytes}


def mapped_gb(config: NodeConfig) -> dict[str, float]:
    """Returns the GB that each tag of both services has mapped, over all ranks."""
    mapped: Counter[str] = Counter()
    for service in ("trainer", "rollout"):
        with open_blocking_channel(node_targets(config)[service]) as channel:
            usage = MemoryServiceStub(channel).GetUsage(memory_pb2.GetUsageRequest(), timeout=STAGE_LIMIT_S)
        for tag in usage.tags:
            mapped[f"{service} {MemoryTag.of(tag.tag)}"] += tag.mapped_bytes
    return {name: round(size / GB, 3) for name, size in mapped.items()}


def round_trip(
    client: Client,
    config: NodeConfig,
    load: Load,
    random: np.random.Generator,
    *,
    settles: bool,
    repeats: bool,
) -> dict[str, Any]:
    """Times the way from the end of an optimizer step to the first token and, after a batch of tokens, back to the trainer.

    repeats: generates a second batch.
    """
    version = client.trainer_state().policy_version
    samples = load.samples(random, count=2 * load.gpus, version=version)
    client.forward_backward(samples)
    client.optim_step(learning_rate=1e-6)
    if settles:
        time.sleep(SETTLE_S)
    started = time.perf_counter()
    there = client.acquire(Phase.ROLLOUT)
    serves = time.perf_counter()
    client.generate([[5, 6, 7]], SamplingParams(max_new_tokens=1))
    answered = time.perf_counter()
    client.generate([[5, 6, 7]], SamplingParams(max_new_tokens=1))
    again = time.perf_counter()
    client.generate(load.questions(random), load.sampling(load.round_tokens), num_samples=load.group)
    generated = time.perf_counter()
    ratio: dict[str, float] = {}
    if repeats:
        client.generate(load.questions(random), load.sampling(load.round_tokens), num_samples=load.group)
        ratio[RATIO] = round((time.perf_counter() - generated) / (generated - again), 3)
    mapped = mapped_gb(config)
    leaving = time.perf_counter()
    back = client.acquire(Phase.TRAIN)
    returned = time.perf_counter()
    client.compute_log_probs(samples[:1])
    computed = time.perf_counter()
    client.compute_log_probs(samples[:1])
    recomputed = time.perf_counter()
    at_most = answered - started + computed - leaving
    return {
        "is_settled": settles,
        "to_rollout_ms": round(1000 * (serves - started), 2),
        "to_first_token_ms": round(1000 * (answered - started), 2),
        "same_token_again_ms": round(1000 * (again - answered), 2),
        "generate_s": round(generated - again, 2),
        **ratio,
        "to_train_ms": round(1000 * (returned - leaving), 2),
        "to_first_log_probs_ms": round(1000 * (computed - leaving), 2),
        "same_log_probs_again_ms": round(1000 * (recomputed - computed), 2),
        "unused_ms": round(1000 * (at_most - (again - answered) - (recomputed - computed)), 2),
        "unused_at_most_ms": round(1000 * at_most, 2),
        "stages_ms": stages_ms(there) | stages_ms(back),
        "stages_gb": stages_gb(there) | stages_gb(back),
        "mapped_gb": mapped,
    }


def memory_by_stage(config: NodeConfig, load: Load) -> dict[str, dict[str, Any]]:
    """GB in use on the first GPU and GB mapped by each tag, after every stage of one round without samples."""
    memory: dict[str, dict[str, Any]] = {"taken_gb": {}, "mapped_gb": {}}
    with open_blocking_channel(node_targets(config)["coordinator"]) as channel:
        coordinator = CoordinatorServiceStub(channel)
        for stage in (rule.stage for rule in RING):
            coordinator.RunStage(pb.RunStageRequest(stage=stage.number), timeout=STAGE_LIMIT_S)
            memory["taken_gb"][stage] = round(taken_bytes(load.device) / GB, 2)
            memory["mapped_gb"][stage] = mapped_gb(config)
    return memory


def measure(
    config: NodeConfig,
    load: Load,
    result: dict[str, Any],
    *,
    turns: Sequence[dict[str, Any]],
    ends_at: float,
    keep: Callable[[], None],
) -> None:
    """Fills `result`, and calls `keep` after every round. turns: arguments of `round_trip` for each."""
    random = np.random.default_rng(0)
    result["rounds"] = []
    with Client(state_dir=config.state_dir, timeout_s=STAGE_LIMIT_S) as client:
        started = time.perf_counter()
        events = client.acquire(Phase.ROLLOUT)
        result["first_to_rollout_ms"] = round(1000 * (time.perf_counter() - started), 1)
        started = time.perf_counter()
        made = client.generate(load.questions(random), load.sampling(load.new_tokens), num_samples=load.group)
        result["generate_s"] = round(time.perf_counter() - started, 2)
        result["generated_tokens"] = sum(len(sample.token_ids) for sample in made)
        started = time.perf_counter()
        events += client.acquire(Phase.TRAIN)
        result["first_to_train_ms"] = round(1000 * (time.perf_counter() - started), 1)
        result["first_stages_ms"] = stages_ms(events)
        started = time.perf_counter()
        client.forward_backward(load.samples(random, count=load.trained_samples, version=0))
        client.optim_step(learning_rate=1e-6)
        result["step_s"] = round(time.perf_counter() - started, 2)
        result["after_step_gb"] = round(taken_bytes(load.device) / GB, 2)
        for turn in turns:
            if time.monotonic() > ends_at:
                break
            result["rounds"].append(round_trip(client, config, load, random, **turn))
            result |= summaries(result["rounds"])
            keep()
        result |= memory_by_stage(config, load)


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and worst of every figure; with ten rounds the worst is the 99th percentile."""
    named = [
        {
            **{key: one[key] for key in (*THERE, *BACK, *UNUSED, RATIO) if key in one},
            **one["stages_ms"],
        }
        for one in rounds
    ]
    names = dict.fromkeys(name for one in named for name in one)
    values = {name: [one[name] for one in named if name in one] for name in names}
    return {name: {"median": statistics.median(each), "worst": max(each)} for name, each in values.items()}


def summaries(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarizes the settled rounds apart."""
    return {
        "summary": summary([each for each in rounds if not each["is_settled"]]),
        "settled": summary([each for each in rounds if each["is_settled"]]),
    }


def turns_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Arguments of `round_trip` for each round."""
    is_odd = [index % 2 == 1 for index in range(arguments.rounds)]
    return [{"settles": each or arguments.settled, "repeats": arguments.settled} for each in is_odd]


def one(
    folder: Path,
    kv: str,
    load: Load,
    result: dict[str, Any],
    *,
    out: Path,
    turns: Sequence[dict[str, Any]],
    overrides: Sequence[str],
    limit_s: float,
    keep: Callable[[], None],
) -> None:
    """Starts a node, measures it into `result` and stops it; its logs go to `out`."""
    ends_at = time.monotonic() + limit_s
    file = folder / f"{kv}.toml"
    file.write_text(load.config(kv))
    config = load_config(file, overrides=overrides)
    started, told = time.monotonic(), list[str]()
    node = start_node(config, tell=told.append)
    result |= {"started_s": round(time.monotonic() - started, 1), "told": told}
    try:
        measure(config, load, result, turns=turns, ends_at=ends_at, keep=keep)
    finally:
        try:
            node.stop()
        finally:  # also of a node that does not stop in time
            shutil.copytree(config.state_dir / "logs", out / f"logs-{kv}", dirs_exist_ok=True)
    audit = subprocess.run(
        [sys.executable, "-m", "tasuki.cli", "audit", str(config.state_dir)], capture_output=True, text=True, check=False
    )
    result["audit"] = {"exit_code": audit.returncode, "text": (audit.stdout + audit.stderr)[-500:]}
    if load.device == "cuda":
        planned = plan_node(load_config(config.state_dir / "node.toml"), gpu_bytes=smallest_gpu(), host_bytes=2000 * GB)
        result["expected_ms"] = {stage: round(1000 * seconds, 1) for stage, seconds in expected_seconds(planned).items()}
        result["planned_gb"] = {each.stage: round(each.gpu_bytes / GB, 2) for each in planned.stages}
    keep()


def smallest_gpu() -> int:
    from tasuki.config.gpus import smallest_gpu_bytes

    size = smallest_gpu_bytes()
    assert size is not None
    return size


def table(kv: str, result: dict[str, Any]) -> list[str]:
    lines = [
        f"kv_tokens {kv}: started in {result['started_s']} s, {len(result['rounds'])} rounds",
        *(f"  {line}" for line in result["told"]),
    ]
    expected = result.get("expected_ms", {})
    stages = [rule.stage for rule in RING]
    order = [*THERE, *stages[:5], *BACK, *stages[5:], *UNUSED, RATIO]
    sides = [result["summary"], result.get("settled") or {}]
    unknown = {"median": float("nan"), "worst": float("nan")}
    for name in order:
        if any(name in side for side in sides):
            figures, other = (side.get(name, unknown) for side in sides)
            first = result["first_stages_ms"].get(name, "")
            lines.append(
                f"  {name:24s}{figures['median']:10.2f}{figures['worst']:10.2f}{other['median']:10.2f}{other['worst']:10.2f}"
                f"{first:>12}{expected.get(name, ''):>10}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--size", choices=SIZES, default="qwen2.5-7b")
    parser.add_argument("--gpus", type=at_least_one, default=GPU.gpus)
    parser.add_argument("--kv", nargs="+", choices=("needed", "most"), default=("needed", "most"))
    parser.add_argument("--rounds", type=at_least_one, default=10)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--settled", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="a key of the node's configuration")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    load = TINY
    if not arguments.tiny:
        require_gpus(arguments.gpus)
        load = replace(GPU, gpus=arguments.gpus)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"size": "tiny" if arguments.tiny else arguments.size, "gpus": load.gpus}

    def keep() -> None:
        (arguments.out / "changeover_gpu.json").write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(arguments.size, folder / "model", is_tiny=arguments.tiny)
        for kv in arguments.kv:
            results[kv] = {}
            one(
                folder,
                kv,
                load,
                results[kv],
                out=arguments.out,
                turns=turns_of(arguments),
                overrides=arguments.set,
                limit_s=arguments.limit_s,
                keep=keep,
            )
            print("\n".join(table(kv, results[kv])), flush=True)


if __name__ == "__main__":
    main()
