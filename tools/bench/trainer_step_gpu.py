"""Training steps on GPUs: `python -m tools.bench.trainer_step_gpu [--out FOLDER] [--cases 0.5b 7b-lora] [--backends fa4] [--ranks 2]
[--compile none blocks]`.

Shapes of Qwen2.5, and one of Qwen3 with experts, with random weights, through the learner and FSDP2, or megatron-core, as the service runs
them: bfloat16 compute, AdamW, packed samples of lognormal lengths (median 1,500, sigma 0.8, at most 8,192; fixed seed). The second half of
each sample is its completion. Reports for each attention backend: real tokens/s, MFU and peak memory (torch's and the driver's), per GPU.
--compile repeats this for each value of trainer.compile; the untimed first step then compiles. Prints a line of JSON per case and writes
trainer_step_gpu.json. --tiny tries it with tiny models on a CPU.

FLOPs of a step: 6 per weight of the layers and token (4 for a frozen model, plus 6 for the adapters). The vocabulary projection counts
likewise, for completion tokens only. Causal attention over L tokens counts 6 L^2 per head element and layer. Of experts only those count
that a token selects. Recomputation does not count. MFU is relative to 989 TFLOP/s.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tasuki.models.shape import ModelShape
from tasuki.planner.choose import chosen
from tasuki.planner.node import node_of
from tasuki.wire.stages import Phase
from tools.bench.gpus import require_gpus
from tools.bench.plan_gpu import SOURCES, make_model_apart, node_for, predict, step_bytes, used_bytes

if TYPE_CHECKING:
    from tasuki.v1.types_pb2 import TrainingSample

MEDIAN, SIGMA, LONGEST, SEED = 1500, 0.8, 8192, 0
MICRO_BATCH_TOKENS, NUM_STEPS, LONG, FEW = 16_384, 3, 65_536, 512
GROUP, GROUP_PROMPT, GROUP_COMPLETION = 8, 8192, 2048
_ADAPTED = {"rank": 32, "experts": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.5b": ("qwen2.5-0.5b", {"checkpointing": "none"}),
    "1.5b": ("qwen2.5-1.5b", {"checkpointing": "none"}),
    "1.5b-recomputed": ("qwen2.5-1.5b", {"checkpointing": "full"}),
    "3b": ("qwen2.5-3b", {"checkpointing": "full"}),
    "3b-kept": ("qwen2.5-3b", {"checkpointing": "none"}),
    "3b-attention": ("qwen2.5-3b", {"checkpointing": "attention"}),
    "7b": ("qwen2.5-7b", {"checkpointing": "full"}),
    "7b-kept": ("qwen2.5-7b", {"checkpointing": "none", "micro_batch_tokens": 12_288}),
    "7b-attention": ("qwen2.5-7b", {"checkpointing": "attention"}),
    "7b-offloaded": ("qwen2.5-7b", {"checkpointing": "offloaded", "kept_layers": 0}),
    "7b-85gb": ("qwen2.5-7b", {"checkpointing": "offloaded", "kept_layers": 5}),
    "7b-shared": (
        "qwen2.5-7b",
        {"checkpointing": "full", "sequence_parallel": 2, "micro_batch_tokens": 2 * MICRO_BATCH_TOKENS},
    ),
    "7b-auto": ("qwen2.5-7b", {}),
    "7b-host": ("qwen2.5-7b", {"checkpointing": "full", "moments": "host"}),
    "7b-60gb": ("qwen2.5-7b", {"checkpointing": "offloaded", "kept_layers": 8, "moments": "host"}),
    "7b-8bit": ("qwen2.5-7b", {"checkpointing": "full", "moments": "8bit"}),
    "7b-tiled": (
        "qwen2.5-7b",
        {"checkpointing": "full", "micro_batch_tokens": LONG + 1, "mlp_tile_tokens": MICRO_BATCH_TOKENS // 2},
    ),
    "7b-long": ("qwen2.5-7b", {"checkpointing": "full", "sequence_parallel": 2, "micro_batch_tokens": LONG + 1}),
    "7b-8-layers-long": (
        "qwen2.5-7b-8-layers",
        {"checkpointing": "full", "sequence_parallel": 2, "micro_batch_tokens": LONG + 1},
    ),
    "7b-8-layers-long-tensor": (
        "qwen2.5-7b-8-layers",
        {"checkpointing": "full", "micro_batch_tokens": LONG + 1, "backend": "megatron", "megatron": {"tensor_parallel": 2}},
    ),
    "7b-few": ("qwen2.5-7b", {"checkpointing": "full"}),
    "7b-few-tensor": ("qwen2.5-7b", {"checkpointing": "full", "backend": "megatron", "megatron": {"tensor_parallel": 2}}),
    "7b-group": ("qwen2.5-7b", {"checkpointing": "full", "prefix_sharing": False, "micro_batch_tokens": 32_768}),
    "7b-group-shared": ("qwen2.5-7b", {"checkpointing": "full", "prefix_sharing": True, "micro_batch_tokens": 32_768}),
    "moe": ("qwen3-moe-12-layers", {"checkpointing": "full"}),
    "moe-parallel": ("qwen3-moe-12-layers", {"checkpointing": "full", "expert_parallel": True}),
    "7b-8-layers": ("qwen2.5-7b-8-layers", {"checkpointing": "full"}),
    "7b-8-layers-tensor": (
        "qwen2.5-7b-8-layers",
        {"checkpointing": "full", "backend": "megatron", "megatron": {"tensor_parallel": 2}},
    ),
    "moe-megatron": (
        "qwen3-moe-12-layers",
        {"checkpointing": "full", "backend": "megatron", "megatron": {"expert_parallel": 2}},
    ),
    "moe-lora": (
        "qwen3-moe-8-layers",
        {
            "checkpointing": "full",
            "expert_parallel": True,
            "lora": {**_ADAPTED, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        },
    ),
    "moe-lora-megatron": (
        "qwen3-moe-8-layers",
        {
            "checkpointing": "full",
            "backend": "megatron",
            "megatron": {"expert_parallel": 2},
            "lora": {**_ADAPTED, "target_modules": ["linear_qkv", "linear_proj"]},
        },
    ),
    "7b-lora": ("qwen2.5-7b", {"checkpointing": "none", "lora": {"rank": 32}}),
    "7b-lora-recomputed": ("qwen2.5-7b", {"checkpointing": "full", "lora": {"rank": 32}}),
}
"""Preset, and settings of [trainer].

"7b-85gb" and "7b-60gb" fit two GPUs of that size, the latter with AdamW's moments on the host. "7b-long" has two samples of LONG tokens,
shared by two ranks, in "7b-8-layers-long-tensor" by megatron-core's; "7b-tiled" has the same samples, one per rank. "7b-few" has two of
FEW tokens. "7b-group" has groups of GROUP samples of one prompt, one per rank; "7b-group-shared" computes each prompt once. "moe" is
Qwen3-30B-A3B with 12 of its 48 layers, which takes two GPUs; in "moe-parallel" the ranks compute their own experts, in "moe-megatron" on
megatron-core. "7b-8-layers-tensor" splits layers over two ranks there.
"""
PEAK_FLOPS = 989e12


def lengths_of(num_samples: int) -> list[int]:
    """Input tokens of the model for each sample."""
    drawn = np.random.default_rng(SEED).lognormal(np.log(MEDIAN), SIGMA, num_samples)
    return np.clip(drawn, 16, LONGEST).astype(int).tolist()


def step_flops(shape: ModelShape, lengths: list[int], *, lora_rank: int | None) -> float:
    """FLOPs of one step, counted as the module's docstring says."""
    units = [shape.layer(index).values() for index in range(shape.num_layers)]
    matrices = [each for unit in units for each in unit if len(each) == 2]
    experts = [
        shape.experts_per_token * rows * columns
        for unit in units
        for _, rows, columns in (each for each in unit if len(each) == 3)
    ]
    weights = sum(rows * columns for rows, columns in matrices) + sum(experts)
    adapters = 0 if lora_rank is None else sum(lora_rank * (rows + columns) for rows, columns in matrices)
    per_weight = 6 if lora_rank is None else 4
    tokens, completions = sum(lengths), sum(length // 2 for length in lengths)
    linear = per_weight * (weights * tokens + shape.vocab_size * shape.hidden_size * completions) + 6 * adapters * tokens
    return linear + 6.0 * sum(length**2 for length in lengths) * shape.query_size * shape.num_layers


def samples_of(lengths: list[int], vocab_size: int) -> Any:
    from tasuki.trainer.service.requests import decode_samples
    from tasuki.v1.types_pb2 import TrainingSample

    generator = np.random.default_rng(SEED)
    samples: list[TrainingSample] = []
    for length in lengths:
        tokens, half = generator.integers(vocab_size, size=length + 1).tolist(), length // 2
        samples.append(
            TrainingSample(
                prompt_token_ids=tokens[:-half],
                completion_token_ids=tokens[-half:],
                rollout_log_probs=[-12.0] * half,
                advantages=generator.normal(size=half).tolist(),
            )
        )
    return decode_samples(samples)


def group_of(seed: int, vocab_size: int, *, shrink: int) -> "list[TrainingSample]":
    """Makes samples of one prompt. shrink: divisor of both lengths."""
    from tasuki.v1.types_pb2 import TrainingSample

    generator, num_completion = np.random.default_rng(seed), GROUP_COMPLETION // shrink
    prompt = generator.integers(vocab_size, size=GROUP_PROMPT // shrink).tolist()
    return [
        TrainingSample(
            prompt_token_ids=prompt,
            completion_token_ids=generator.integers(vocab_size, size=num_completion).tolist(),
            rollout_log_probs=[-12.0] * num_completion,
            advantages=generator.normal(size=num_completion).tolist(),
        )
        for _ in range(GROUP)
    ]


def measure(case: str, folder: Path, backend: str, compiled: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one case in one rank."""
    from tasuki.algorithms.loss_types import LossConfig
    from tasuki.trainer.launch import read_launch
    from tasuki.trainer.memory import round_blocks
    from tasuki.trainer.modules.compiled_blocks import num_graphs
    from tasuki.trainer.replicas import start_mesh
    from tasuki.trainer.service.requests import decode_samples
    from tasuki.trainer.wire import Role
    from tests.integration.learning import micro_batches, start_learner, with_denominator

    device = "cpu" if arguments.tiny else "cuda"
    preset, settings = CASES[case]
    shape, lengths = node_for(preset, gpu_bytes=1, device=device, num_ranks=1).model, lengths_of(arguments.samples)
    for name, num_tokens in {"long": LONG, "tiled": LONG, "few": FEW}.items():
        if name in case:
            lengths = [num_tokens // 64 if arguments.tiny else num_tokens] * 2
    launch = read_launch(os.environ)
    mesh = start_mesh(device, launch=launch, gpu=launch.rank, num_threads=1, timeout_s=60)
    started = time.perf_counter()
    choice = {"compile": compiled} | ({} if backend == "default" else {"attention_backend": backend})
    settings = {"micro_batch_tokens": arguments.micro_batch_tokens, **settings, **choice}
    choices = {"kept_layers": min(settings.pop("kept_layers"), shape.num_layers)} if "kept_layers" in settings else {}
    learner = start_learner(folder, mesh=mesh, compute_dtype="bfloat16", choices=choices, **settings)
    start_s = time.perf_counter() - started
    backend_of: Any = learner.backend
    if device == "cuda" and backend_of._node.trainer.spreads_experts:
        round_blocks()
    planned = chosen(node_of(backend_of._node, gpu_bytes=1, host_bytes=1), backend_of._choices)
    samples = samples_of(lengths, shape.vocab_size)
    if "group" in case:
        shrink = 64 if arguments.tiny else 1
        groups = (group_of(rank, shape.vocab_size, shrink=shrink) for rank in range(mesh.size()))
        samples = decode_samples([sample for group in groups for sample in group])
        lengths = (samples.num_tokens_S - 1).tolist()
    config = with_denominator(LossConfig(), samples)
    batches = micro_batches(learner, samples, config=config, max_tokens=settings["micro_batch_tokens"])
    seconds: list[float] = []
    reserved: list[int] = []
    losses: list[float] = []
    norms: list[float] = []

    def step() -> None:
        losses.append(learner.forward_backward(Role.POLICY, batches, config=config).loss)
        norms.append(learner.optim_step(Role.POLICY, learning_rate=1e-6).grad_norm)

    for _ in range(arguments.steps):
        started = time.perf_counter()
        step()  # returns once the norm is on the host, while the optimizer's kernels still run
        if device == "cuda":
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
        seconds.append(time.perf_counter() - started)
    step_s = statistics.median(seconds[1:])
    lora = settings.get("lora")
    flops = step_flops(shape, lengths, lora_rank=None if lora is None else lora["rank"])
    result = {
        "case": case,
        "backend": backend,
        "compile": compiled,
        "graphs": num_graphs(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "ranks": mesh.size(),
        "samples": len(lengths),
        "tokens": sum(lengths),
        "micro_batch_tokens": settings["micro_batch_tokens"],
        "checkpointing": f"{planned.checkpointing}, {planned.kept_layers} layers kept",
        "micro_batches": len(batches),
        "start_s": round(start_s, 1),
        "seconds": [round(each, 3) for each in seconds],
        "tokens_per_s": round(sum(lengths) / step_s / mesh.size()),
        "mfu": round(flops / step_s / mesh.size() / PEAK_FLOPS, 4),
        "driver_bytes": used_bytes(device),
        "losses": losses,
        "grad_norms": norms,
    }
    if device == "cuda":
        memory = backend_of.memory
        num_groups = mesh.size() // learner.backend.sequence_part.num_parts
        node = replace(planned, logit_tokens=sum(lengths) // 2 // (len(batches) * num_groups))
        result |= {
            "allocated_bytes": sum(usage.total_bytes for usage in memory.usage()) + step_bytes(memory, device),
            "reserved_bytes": reserved,
            "predicted_bytes": {kind: predict(node)[Phase.TRAIN, kind] for kind in ("allocated", "driver")},
        }
    learner.backend.close()
    return result


def _options(arguments: argparse.Namespace) -> list[str]:
    values = {name: getattr(arguments, name.replace("-", "_")) for name in ("samples", "ranks", "micro-batch-tokens", "steps")}
    return [*(f"--{name}={value}" for name, value in values.items()), *(["--tiny"] if arguments.tiny else [])]


def run_case(case: str, folder: Path, backend: str, compiled: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one process per rank, on the model in `folder`. `error` has the last lines of one that fails."""
    facts = {"case": case, "backend": backend, "compile": compiled}
    part = ["-m", "tools.bench.trainer_step_gpu", *_options(arguments), "--part", case, str(folder), backend, compiled]
    launch = [sys.executable, "-m", "tasuki.trainer.launch", "--num-ranks", str(arguments.ranks), "--", *part]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(launch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        try:
            said, complaint = ran.communicate(timeout=arguments.run_limit_s)
        except subprocess.TimeoutExpired:
            return {**facts, "error": f"took more than {arguments.run_limit_s} s"}
        finally:
            ran.terminate()  # which ends all ranks
    answers = [line for line in said.splitlines() if line.startswith("RESULT ")]
    if ran.returncode or not answers:
        return {**facts, "error": complaint[-2000:]}
    return json.loads(answers[-1].removeprefix("RESULT "))


def run_preset(preset: str, cases: list[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs each case with each backend and value of trainer.compile, on one model."""
    device = "cpu" if arguments.tiny else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        node = node_for(preset, gpu_bytes=1, device=device, num_ranks=arguments.ranks)
        make_model_apart(Path(folder), node, device)
        for case, backend, compiled in product(cases, arguments.backends, arguments.compile):
            yield run_case(case, Path(folder), backend, compiled, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--backends", nargs="+", help='or "default", without the setting; by default all, with --tiny sdpa')
    parser.add_argument("--compile", nargs="+", choices=["none", "blocks"], default=["none"], help="of trainer.compile")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=1, help="a GPU each")
    parser.add_argument("--micro-batch-tokens", type=int, default=MICRO_BATCH_TOKENS)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="at least 2; the first is not timed")
    parser.add_argument("--run-limit-s", type=int, default=600, help="of one case")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        case, folder, backend, compiled = arguments.part
        result = measure(case, Path(folder), backend, compiled, arguments)
        if os.environ["RANK"] == "0":
            print("RESULT " + json.dumps(result), flush=True)
        os._exit(0)
    if arguments.steps < 2:
        parser.error("--steps must be at least 2")
    arguments.backends = arguments.backends or (["sdpa"] if arguments.tiny else ["fa4", "varlen", "sdpa"])
    if not arguments.tiny:
        require_gpus(arguments.ranks)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for preset, cases in groupby(arguments.cases, key=lambda case: CASES[case][0]):
        for result in run_preset(preset, list(cases), arguments):
            print(json.dumps(result), flush=True)
            results.append(result)
            (arguments.out / "trainer_step_gpu.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
