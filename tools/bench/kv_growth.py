"""Tokens a second from a growing KV cache, beside one that is mapped whole: `python -m tools.bench.kv_growth [--rounds 10]`, on a CPU.

Two rollout services of one small model take turns, one of them with kv_growth; the other one sleeps during a turn. Each turn wakes the
service and generates at once: a batch in one call, or a stream in which every worker requests its next sample when its last one has ended.
Seconds are from the end of RESUME_KV to the last sample; CPU seconds are those of the service with its ranks. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tasuki.v1 import types_pb2
from tests.integration.rollout_process import (
    RolloutClient,
    RolloutProcess,
    TestTrainer,
    connected,
    start_rollout,
    stop_rollout,
    wait_until_serving,
)
from tests.models import make_model, save_checkpoint
from tools.bench.gpus import at_least_one

KV = types_pb2.MEMORY_TAG_KV_CACHE
CONTEXT = 256


@dataclass
class Side:
    """One of the two services, with the times of its turns."""

    name: str
    rollout: RolloutProcess
    trainer: TestTrainer
    client: RolloutClient
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    mapped_mib: dict[str, float] = field(default_factory=dict[str, float])

    async def turn(self, load: str, arguments: argparse.Namespace, *, version: int, counts: bool) -> None:
        await self.client.wake(self.trainer.publish(version))
        cpu, started = self._cpu_seconds(), time.perf_counter()
        if load == "batch":
            await self._generate(arguments, num_samples=arguments.samples)
        else:
            per_worker = arguments.samples // arguments.workers
            await asyncio.gather(*(self._ask_on(arguments, per_worker) for _ in range(arguments.workers)))
        seconds, cpu = time.perf_counter() - started, self._cpu_seconds() - cpu
        await self.client.drain()
        paused = await self.client.pause(types_pb2.STAGE_PAUSE_KV, KV)
        await self.client.sleep()
        if counts:
            self.seconds.setdefault(load, []).append(round(seconds, 3))
            self.cpu_seconds.setdefault(load, []).append(round(cpu, 3))
            self.mapped_mib[load] = paused.released_bytes / 2**20

    async def _ask_on(self, arguments: argparse.Namespace, num_samples: int) -> None:
        for _ in range(num_samples):
            await self._generate(arguments, num_samples=1)

    async def _generate(self, arguments: argparse.Namespace, *, num_samples: int) -> None:
        prompt = [[5 + index % 100 for index in range(arguments.prompt)]]
        await self.client.generate(prompt, num_samples=num_samples, max_new_tokens=arguments.tokens, ignore_eos=True)

    def _cpu_seconds(self) -> float:
        process = psutil.Process(self.rollout.process.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(one.user + one.system for one in times)


async def measure(sides: Sequence[Side], arguments: argparse.Namespace) -> None:
    version = 0
    for load in ("batch", "stream"):
        for number in range(arguments.rounds + 1):
            for side in sides if number % 2 else reversed(sides):
                version += 1
                await side.turn(load, arguments, version=version, counts=number > 0)


async def run(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    model = save_checkpoint(make_model("qwen2", seed=0, max_position_embeddings=CONTEXT), folder / "model")
    rollouts = {
        name: start_rollout(folder / name, model, f"rollout.kv_tokens={arguments.kv_tokens}", *settings)
        for name, settings in (("whole", ()), ("grows", ("rollout.kv_growth=true",)))
    }
    async with AsyncExitStack() as stack:
        sides: list[Side] = []
        for name, rollout in rollouts.items():
            stack.callback(stop_rollout, rollout)
            wait_until_serving(rollout)
            trainer = TestTrainer(rollout.socket_dir, "trainer", make_model("qwen2", seed=1, max_position_embeddings=CONTEXT))
            stack.callback(trainer.close)
            sides.append(Side(name, rollout, trainer, await stack.enter_async_context(connected(rollout))))
        await measure(sides, arguments)
        return summary(*sides)


def summary(whole: Side, grows: Side) -> dict[str, Any]:
    """speed: of the growing cache, relative to the whole one; the median over pairs of turns."""
    return {
        load: {
            "seconds": {side.name: side.seconds[load] for side in (whole, grows)},
            "cpu_seconds": {side.name: side.cpu_seconds[load] for side in (whole, grows)},
            "mapped_mib": {side.name: side.mapped_mib[load] for side in (whole, grows)},
            "speed": ratio(whole.seconds[load], grows.seconds[load]),
            "speed_in_cpu_time": ratio(whole.cpu_seconds[load], grows.cpu_seconds[load]),
        }
        for load in whole.seconds
    }


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return round(statistics.median(one / other for one, other in zip(ours, others, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"rounds": 10, "samples": 256, "workers": 64, "prompt": 32, "tokens": 96, "kv_tokens": 524_288}
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=at_least_one, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run(Path(folder), arguments))
    print(json.dumps({**vars(arguments), **result}))


if __name__ == "__main__":
    main()
