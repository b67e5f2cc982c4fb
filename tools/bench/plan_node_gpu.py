"""The planner against a whole node: `python tools/bench/plan_node_gpu.py [--out FOLDER] [--sizes qwen2.5-0.5b ...] [--gpus N] [--critic]`.

Starts a node per size with N trainer ranks and TP N on N GPUs, random weights, float32 masters and checkpointing. Two micro-batches of
8,192 tokens are all completion positions, so that `tasuki plan` of the same configuration is comparable. With --critic a critic of the same
size takes a step as well, as in PPO. After each stage, and at the peaks of a training step and of a full batch, it reads NVML's used bytes
of the first GPU, less those before the node started. Writes plan_node_gpu.json and prints a table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tasuki.client import Client, LossConfig, Phase, Role, SamplingParams, TrainingSample, ValueLoss
from tasuki.config.load import load_config
from tasuki.config.paths import node_targets
from tasuki.planner.choose import plan_node
from tasuki.planner.node import GB
from tasuki.planner.plan import PLAN_STAGES, PlanStage
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.stages import RING, Stage
from tests.models import char_tokenizer
from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.plan_gpu import SIZES, make_model
from tools.bench.plan_gpu import node_for as trainer_node

NUM_TOKENS, NUM_STEPS, NUM_REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 8192, 2, 256, 512, 64
LIMIT_S = 300.0
CONFIG = """
state_dir = "node"
device = "cuda"
[model]
path = "model"
[trainer]
num_ranks = {gpus}
checkpointing = "full"
micro_batch_tokens = {tokens}
router_replay = false
[rollout]
tp_size = {gpus}
max_running_requests = {requests}
engine = {{ attention_backend = "triton", sampling_backend = "pytorch" }}
"""
CRITIC = """
[trainer.critic]
learning_rate = 1e-6
"""


def nvml_bytes() -> tuple[int, int]:
    """Returns used and total bytes of the first visible GPU."""
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    first = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(first))
    return memory.used, memory.total


@contextmanager
def highest(seen: dict[PlanStage, int], stage: PlanStage, before: int) -> Iterator[None]:
    """Puts the peak of used bytes during the block into `seen`."""
    done = threading.Event()
    seen[stage] = 0

    def watch() -> None:
        while not done.wait(0.01):
            seen[stage] = max(seen[stage], nvml_bytes()[0] - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def train(client: Client, samples: list[TrainingSample], *, has_critic: bool) -> None:
    """Makes one step of the policy, and of the critic with PPO."""
    if has_critic:
        values = client.compute_values(samples)
        with_values = [replace(sample, values=row, returns=row + 1.0) for sample, row in zip(samples, values, strict=True)]
        client.forward_backward(with_values, LossConfig(loss=ValueLoss(clip=0.2)), role=Role.CRITIC)
        client.optim_step(role=Role.CRITIC, learning_rate=1e-6)
    client.forward_backward(samples)
    client.optim_step(learning_rate=1e-6)


def measure(config: Path, *, gpus: int, before: int, has_critic: bool) -> dict[PlanStage, int]:
    """Walks the stages of a running node once, after a full turn of warm-up in which one-time allocations are made."""
    state_dir, seen = config.parent / "node", dict[PlanStage, int]()
    random = np.random.default_rng(0)
    prompts = random.integers(1, 30_000, (NUM_REQUESTS, PROMPT_TOKENS)).tolist()
    coordinator = CoordinatorServiceStub(open_blocking_channel(node_targets(load_config(config))["coordinator"]))
    with Client(state_dir=state_dir) as client:
        for turn in range(NUM_STEPS):
            client.acquire(Phase.TRAIN)
            samples = [
                TrainingSample(
                    prompt_token_ids=[5],
                    completion_token_ids=(tokens := random.integers(1, 30_000, NUM_TOKENS - 1).tolist()),
                    rollout_log_probs=np.full(len(tokens), -11.0, dtype=np.float32),
                    advantages=1.0,
                    policy_version=turn,
                )
                for _ in range(2 * gpus)
            ]
            with highest(seen, Phase.TRAIN, before):
                train(client, samples, has_critic=has_critic)
            if turn == 0:
                client.acquire(Phase.ROLLOUT)
                client.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS))
        for rule in RING[:5]:
            seen[rule.stage] = run(coordinator, rule.stage, before)
        with highest(seen, Phase.ROLLOUT, before):
            client.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS))
        for rule in RING[5:]:
            seen[rule.stage] = run(coordinator, rule.stage, before)
    return seen


def run(coordinator: CoordinatorServiceStub, stage: Stage, before: int) -> int:
    """Returns the bytes in use after the stage."""
    coordinator.RunStage(pb.RunStageRequest(stage=stage.number), timeout=LIMIT_S)
    return nvml_bytes()[0] - before


def tasuki(*arguments: str | Path) -> None:
    done = subprocess.run([sys.executable, "-m", "tasuki.cli", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"tasuki {arguments[0]}: {done.stderr}")


def one(size: str, *, gpus: int, has_critic: bool) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Returns GB by stage, and the lines of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        before, gpu_bytes = nvml_bytes()
        make = [sys.executable, "-c", f"from tools.bench.plan_node_gpu import make; make({size!r}, {str(folder / 'model')!r})"]
        subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
        config = folder / "node.toml"
        config.write_text(CONFIG.format(gpus=gpus, tokens=NUM_TOKENS, requests=NUM_REQUESTS) + (CRITIC if has_critic else ""))
        started = time.monotonic()
        tasuki("up", config)
        try:
            start_s = time.monotonic() - started
            measured = measure(config, gpus=gpus, before=before, has_critic=has_critic)
        finally:
            tasuki("down", config)
        planned = plan_node(load_config(config), gpu_bytes=gpu_bytes - before, host_bytes=1000 * GB)
    what = f"{size}{' with a critic' if has_critic else ''}, {gpus} GPUs"
    rows, lines = dict[str, dict[str, float]](), [f"{what}, started in {start_s:.0f} s"]
    for stage in PLAN_STAGES:
        predicted = sum(planned.stage(stage).gpus[0].values())
        rows[stage] = {"predicted": predicted / GB, "measured": measured[stage] / GB, "error": predicted / measured[stage] - 1}
        lines.append(f"  {stage:16s}{predicted / GB:9.2f}{measured[stage] / GB:9.2f}{100 * rows[stage]['error']:+8.1f} %")
    return rows, lines


def make(size: str, folder: str) -> None:
    """Makes a model folder, with a tokenizer that nobody uses."""
    char_tokenizer().save_pretrained(folder)
    make_model(Path(folder), trainer_node(size, gpu_bytes=GB, device="cuda", num_ranks=1), "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--gpus", type=at_least_one, default=1)
    parser.add_argument("--critic", action="store_true")
    arguments = parser.parse_args()
    require_gpus(arguments.gpus)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"gpus": arguments.gpus, "critic": arguments.critic}
    for size in arguments.sizes:
        results[size], lines = one(size, gpus=arguments.gpus, has_critic=arguments.critic)
        print("\n".join(lines), flush=True)
        (arguments.out / "plan_node_gpu.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
