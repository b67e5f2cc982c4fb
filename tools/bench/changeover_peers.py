"""Changeovers beside those of verl and slime: `python -m tools.bench.changeover_peers [--size qwen2.5-3b] [--gpus 1] [--out FOLDER]`.

Their side follows verl and slime, tuned: SGLang with torch_memory_saver, one engine per GPU, and an FSDP2 trainer. Masters and moments move
to pinned host memory and back; weights are sent in flattened buckets of 512 MB as CUDA IPC handles. To rollout: resume the weights, send
them, offload the trainer, resume the KV cache, generate a token. To training: release KV cache and weights, load the trainer. Both caches
take `rollout.kv_ratio` of the memory. Our side is `changeover_gpu` with the same size and rounds, run first. Writes changeover_peers.json
and changeover_peers.png, and prints a table of medians and maxima in ms. --tiny tries their side alone with a small model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tools.bench.changeover_chart import chart
from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.node_load import GPU, TINY, Load, make_model
from tools.bench.plan_gpu import SIZES
from tools.bench.sync_ranks import Ranks

BUCKET_BYTES = 512 << 20
KV_RATIO = 0.85
TO_ROLLOUT, FIRST_TOKEN, TO_TRAIN = "to_rollout_ms", "to_first_token_ms", "to_train_ms"
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "grammar_backend": "none",
    "sampling_backend": "pytorch",
    "sleep_on_idle": True,
    "log_level": "warning",
}
ON_GPU: dict[str, Any] = {
    "attention_backend": "triton",
    "enable_memory_saver": True,
    "mem_fraction_static": KV_RATIO,
    "disable_prefill_cuda_graph": True,
}
ON_CPU: dict[str, Any] = {
    "attention_backend": "torch_native",
    "device": "cpu",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 2048,
    "max_running_requests": 32,
    "mem_fraction_static": 0.2,
}


class Peers:
    """Their trainer and engines, which start while the trainer's state is on the host."""

    def __init__(self, model: Path, folder: Path, load: Load) -> None:
        self._load = load
        common = {"num_ranks": load.gpus, "model": str(model), "folder": str(folder), "device": load.device}
        self._trainers = Ranks("tools.bench.peer_fsdp", [[json.dumps(common | {"rank": rank})] for rank in range(load.gpus)])
        self._trainers.ask(self._step(load.trained_samples // load.gpus))
        self.state_bytes = sum(each["num_bytes"] for each in self._trainers.ask("offload"))
        self._engines = [self._engine(model, index) for index in range(load.gpus)]
        self._ask_each("first_token")
        self._release()
        self._trainers.ask("load")

    def round(self) -> dict[str, float]:
        """Times the way from the end of a step to the first token, and from a batch's last token to a trainer that has its state."""
        self._trainers.ask(self._step(2))
        times = dict[str, float]()
        started = time.perf_counter()
        timed(times, "resume weights", lambda: self._ask_each("resume weights"))
        timed(times, "send weights", self._send)
        timed(times, "offload", lambda: self._trainers.ask("offload"))
        timed(times, "resume kv_cache", lambda: self._ask_each("resume kv_cache"))
        times[TO_ROLLOUT] = 1e3 * (time.perf_counter() - started)
        self._ask_each("first_token")
        times[FIRST_TOKEN] = 1e3 * (time.perf_counter() - started)
        load = self._load
        prompts = load.prompts * load.group // load.gpus
        self._ask_each(f"generate {prompts} {load.prompt_tokens} {load.round_tokens}")
        started = time.perf_counter()
        timed(times, "release kv_cache", lambda: self._ask_each("release kv_cache"))
        timed(times, "release weights", lambda: self._ask_each("release weights"))
        timed(times, "load", lambda: self._trainers.ask("load"))
        times[TO_TRAIN] = 1e3 * (time.perf_counter() - started)
        return {name: round(value, 2) for name, value in times.items()}

    def close(self) -> None:
        self._trainers.close()
        for engine in self._engines:
            engine.close()

    def _engine(self, model: Path, index: int) -> Ranks:
        of_device = {**ON_GPU, "base_gpu_id": index} if self._load.device == "cuda" else ON_CPU
        arguments = {**SETTINGS, **of_device, "model_path": str(model), "context_length": self._load.context}
        return Ranks("tools.bench.peer_saver_engine", [[json.dumps(arguments)]])

    def _step(self, num_samples: int) -> str:
        return f"step {num_samples} {self._load.prompt_tokens + self._load.new_tokens}"

    def _release(self) -> None:
        self._ask_each("release kv_cache")
        self._ask_each("release weights")

    def _send(self) -> None:
        index, num_buckets = 0, 1
        while index < num_buckets:
            answers = self._trainers.ask(f"bucket {BUCKET_BYTES} {index}")
            index, num_buckets = index + 1, answers[0]["num_buckets"]
            payloads = [each["payload"] for each in answers]
            for number, engine in enumerate(self._engines):
                engine.tell("update " + json.dumps({"payloads": payloads, "index": number}))
            for engine in self._engines:
                engine.hear()

    def _ask_each(self, line: str) -> None:
        for engine in self._engines:
            engine.tell(line)
        for engine in self._engines:
            engine.hear()


def timed(times: dict[str, float], name: str, act: Callable[[], object]) -> None:
    started = time.perf_counter()
    act()
    times[name] = 1e3 * (time.perf_counter() - started)


def summary(rounds: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Median and maximum of the rounds after the first."""
    later = rounds[1:] or rounds
    return {
        name: {"median": statistics.median(each[name] for each in later), "worst": max(each[name] for each in later)}
        for name in later[0]
    }


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs `changeover_gpu` in a separate process, with the same output folder, and returns its results."""
    command = [sys.executable, "-m", "tools.bench.changeover_gpu", "--size", arguments.size, "--gpus", str(arguments.gpus)]
    options = ["--kv", *arguments.kv, "--rounds", str(2 * arguments.rounds), "--out", str(arguments.out)]
    subprocess.run([*command, *options, "--limit-s", str(arguments.limit_s)], check=True)
    return json.loads((arguments.out / "changeover_gpu.json").read_text())


def table(results: Mapping[str, Any]) -> str:
    lines = [f"{'':24s}{'to rollout':>18s}{'first token':>18s}{'to training':>18s}   ms: median / worst"]
    sides = {f"tasuki, {kv}": found["settled"] for kv, found in results["ours"].items() if isinstance(found, dict)}
    for side, figures in {**sides, "torch_memory_saver way": results["theirs"]["summary"]}.items():
        cells = [
            f"{figures[name]['median']:8.0f} /{figures[name]['worst']:6.0f}" for name in (TO_ROLLOUT, FIRST_TOKEN, TO_TRAIN)
        ]
        lines.append(f"{side:24s}" + "".join(f"{cell:>18s}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--size", choices=SIZES, default="qwen2.5-3b")
    parser.add_argument("--gpus", type=at_least_one, default=1)
    parser.add_argument("--kv", nargs="+", choices=("needed", "most"), default=("needed",))
    parser.add_argument(
        "--rounds", type=at_least_one, default=5, help="of theirs after the first, and of ours that are settled"
    )
    parser.add_argument("--limit-s", type=float, default=200.0, help="of each side")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    arguments.out.mkdir(parents=True, exist_ok=True)
    size = "tiny" if arguments.tiny else arguments.size
    results: dict[str, Any] = {"size": size, "gpus": arguments.gpus, "gpu": "CPU", "ours": {}}
    if not arguments.tiny:
        require_gpus(arguments.gpus)
        results["gpu"] = torch.cuda.get_device_name()
        results["ours"] = ours(arguments)
    load = TINY if arguments.tiny else replace(GPU, gpus=arguments.gpus)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(arguments.size, folder / "model", is_tiny=arguments.tiny)
        ends_at = time.monotonic() + arguments.limit_s
        peers = Peers(folder / "model", folder, load)
        rounds = list[dict[str, float]]()
        for _ in range(arguments.rounds + 1):
            if time.monotonic() < ends_at:
                rounds.append(peers.round())
                results["theirs"] = {"state_bytes": peers.state_bytes, "rounds": rounds, "summary": summary(rounds)}
                (arguments.out / "changeover_peers.json").write_text(json.dumps(results, indent=1) + "\n")
        peers.close()
    print(table(results))
    chart(results, arguments.out / "changeover_peers.png")


if __name__ == "__main__":
    main()
