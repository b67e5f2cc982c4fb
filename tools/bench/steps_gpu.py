"""Whole steps of a node, by the way that weights reach the engine: `python -m tools.bench.steps_gpu [--size qwen2.5-7b] [--ways merged
...]`.

A node with random weights, N trainer ranks and N replicas, started once per way. "full" trains all parameters; the others train adapters of
rank 32. Rollout gets these "merged" or as an "adapter". Each step generates 64 x
8 samples (256 + 512 tokens) right after the changeover, then as many again, and learns from some of them. For each batch: tokens/s, and the
tokens within 2 s of the first one, found by probes among its samples that end earlier. A changeover that slows generation shows in the
first batch alone. Also reported per way: seconds of the changeovers, the KV cache, memory by stage. --tiny: a small model on a CPU. Writes
steps_gpu.json after each step, and prints a table. TMPDIR is the folder for the model, such as /dev/shm.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tasuki.client import AsyncClient, Phase
from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.node.start import start_node
from tasuki.planner.choose import plan_node
from tasuki.planner.node import GB
from tasuki.planner.presets import MODELS
from tools.bench.changeover_gpu import STAGE_LIMIT_S, mapped_gb, smallest_gpu, stages_ms, taken_bytes
from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.node_load import GPU, TINY, Load, make_model

_ADAPTERS = ("trainer.lora.rank=32",)
WAYS = {
    "full": (),
    "merged": _ADAPTERS,
    "adapter": (*_ADAPTERS, 'rollout.lora="adapter"'),
}
EARLY_S, NUM_PROBES = 2.0, 32


async def batch(client: AsyncClient, load: Load, random: np.random.Generator) -> dict[str, float]:
    """Generates one step's samples at once, with a few probes that end earlier."""
    lengths = [load.new_tokens * (index + 1) // NUM_PROBES for index in range(NUM_PROBES)]
    lengths = sorted({1, *(length for length in lengths if length)})
    started = time.perf_counter()

    async def ended_s(prompt: list[int], num_tokens: int) -> float:
        await client.generate([prompt], load.sampling(num_tokens))
        return time.perf_counter() - started

    questions = load.questions(random)
    probes = [ended_s(random.integers(3, load.vocab_size, load.prompt_tokens).tolist(), length) for length in lengths]
    samples, ends_s = await asyncio.gather(
        client.generate(questions, load.sampling(load.new_tokens), num_samples=load.group), asyncio.gather(*probes)
    )
    seconds = time.perf_counter() - started
    assert all(len(sample.token_ids) == load.new_tokens for sample in samples)
    return {
        "first_token_s": round(ends_s[0], 3),
        "early_tokens": early_tokens(lengths, ends_s),
        "tokens_per_s": round((len(samples) * load.new_tokens + sum(lengths)) / seconds, 1),
        "seconds": round(seconds, 3),
    }


def early_tokens(lengths: Sequence[int], ends_s: Sequence[float]) -> float:
    """Returns the tokens per sample within EARLY_S of the first one, interpolated between the probes of these lengths."""
    return round(float(np.interp(ends_s[0] + EARLY_S, np.maximum.accumulate(ends_s), lengths)), 1)


async def step(client: AsyncClient, load: Load, config: NodeConfig, random: np.random.Generator) -> dict[str, Any]:
    async def timed_ms(phase: Phase) -> tuple[float, dict[str, float]]:
        started = time.perf_counter()
        events = await client.acquire(phase)
        return round(1000 * (time.perf_counter() - started), 1), stages_ms(events)

    to_rollout_ms, there = await timed_ms(Phase.ROLLOUT)
    after, steady = [await batch(client, load, random) for _ in range(2)]
    state = await client.rollout_state()
    rollout = {
        "mapped_gb": await asyncio.to_thread(mapped_gb, config),
        "taken_gb": round(taken_bytes(load.device) / GB, 2),
    }
    to_train_ms, back = await timed_ms(Phase.TRAIN)
    samples = load.samples(random, count=load.trained_samples, version=state.policy_version or 0)
    started = time.perf_counter()
    await client.forward_backward(samples)
    norm = (await client.optim_step(learning_rate=1e-6)).grad_norm
    return {
        "to_rollout_ms": to_rollout_ms,
        "after": after,
        "steady": steady,
        "early_ratio": round(after["early_tokens"] / steady["early_tokens"], 3),
        "to_train_ms": to_train_ms,
        "learn_s": round(time.perf_counter() - started, 2),
        "grad_norm": norm,
        "stages_ms": there | back,
        "rollout": rollout,
        "train_gb": round(taken_bytes(load.device) / GB, 2),
    }


async def steps(
    config: NodeConfig, load: Load, *, num_steps: int, ends_at: float, add: Callable[[dict[str, Any]], None]
) -> None:
    random = np.random.default_rng(0)
    async with AsyncClient(state_dir=config.state_dir, timeout_s=STAGE_LIMIT_S) as client:
        for _ in range(num_steps):
            if time.monotonic() < ends_at:
                add(await step(client, load, config, random))


def one(
    folder: Path, way: str, load: Load, result: dict[str, Any], *, arguments: argparse.Namespace, keep: Callable[[], None]
) -> None:
    """Starts a node, measures its steps into `result` and stops it; its logs go to the results folder."""
    ends_at = time.monotonic() + arguments.limit_s
    file = folder / f"{way}.toml"
    with_probes = replace(load, prompts=load.prompts + -(-NUM_PROBES // load.group))
    file.write_text(with_probes.config(arguments.kv))
    config = load_config(file, overrides=(f"state_dir={folder / way}", *WAYS[way], *arguments.set))
    started = time.monotonic()

    def add(found: dict[str, Any]) -> None:
        result["steps"].append(found)
        keep()

    try:
        node = start_node(config, tell=lambda _: None)
        result |= {"started_s": round(time.monotonic() - started, 1), "steps": []}
        try:
            asyncio.run(steps(config, load, num_steps=arguments.steps, ends_at=ends_at, add=add))
        finally:
            node.stop()
    finally:
        shutil.copytree(config.state_dir / "logs", arguments.out / f"logs-{way}", dirs_exist_ok=True)
    if load.device == "cuda":
        planned = plan_node(load_config(config.state_dir / "node.toml"), gpu_bytes=smallest_gpu(), host_bytes=2000 * GB)
        result["planned_gb"] = {each.stage: round(each.gpu_bytes / GB, 2) for each in planned.stages}
    keep()


def line(way: str, steps: Sequence[dict[str, Any]]) -> str:
    """Medians over the steps after the first, which includes start-up costs."""
    if not steps:
        return f"{way:8s} no step began within --limit-s"
    later = steps[1:] or steps
    rate, early, to_rollout, to_train, learn = (
        statistics.median(of)
        for of in (
            [each["steady"]["tokens_per_s"] for each in later],
            [each["early_ratio"] for each in later],
            [each["to_rollout_ms"] for each in later],
            [each["to_train_ms"] for each in later],
            [each["learn_s"] for each in later],
        )
    )
    kv_gb = max(each["rollout"]["mapped_gb"].get("rollout kv_cache", 0.0) for each in steps)
    return (
        f"{way:8s} {len(steps)} steps: {rate:8.0f} tokens/s, {early:.2f} of it in the first {EARLY_S:.0f} s; "
        f"to rollout {to_rollout:.0f} ms, to train {to_train:.0f} ms, learning {learn:.2f} s; KV cache {kv_gb:.1f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--size", choices=[name for name in MODELS if name.startswith("qwen2.5")], default="qwen2.5-7b")
    parser.add_argument("--gpus", type=at_least_one, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=("merged", "adapter"))
    parser.add_argument("--kv", choices=("needed", "most"), default="needed")
    parser.add_argument("--steps", type=at_least_one, default=4)
    parser.add_argument("--new-tokens", type=at_least_one, help=f"of each sample (default: {GPU.new_tokens})")
    parser.add_argument("--learned", type=at_least_one, help=f"samples of a step (default: {GPU.trained_samples})")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of a node: no step is begun that starts later")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="a key of the node's configuration")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    load = TINY
    if not arguments.tiny:
        require_gpus(arguments.gpus)
        load = replace(GPU, gpus=arguments.gpus)
    load = replace(
        load,
        new_tokens=arguments.new_tokens or load.new_tokens,
        trained_samples=arguments.learned or load.trained_samples,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"size": "tiny" if arguments.tiny else arguments.size, "gpus": load.gpus, "kv": arguments.kv}

    def keep() -> None:
        (arguments.out / "steps_gpu.json").write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(arguments.size, folder / "model", is_tiny=arguments.tiny)
        for way in arguments.ways:
            results[way] = {}
            one(folder, way, load, results[way], arguments=arguments, keep=keep)
            print(line(way, results[way]["steps"]), flush=True)


if __name__ == "__main__":
    main()
