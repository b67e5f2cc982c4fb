"""The planner against a GPU: `python tests/bench/plan_gpu.py [--out FOLDER] [--sizes qwen2.5-0.5b ...]`.

One FSDP2 rank for each size, in a process of its own: random weights, float32 masters, AdamW, bfloat16 compute, full checkpointing, two
ForwardBackwards of one micro-batch and OptimStep, then a publish and a pause of all tags. For each stage: predicted bytes, what torch's
allocator held at most (training) and what the driver says is taken, and the error. Writes plan_gpu.json and prints a table. With --tiny it
runs on a CPU, to try it out; there nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "protos"), str(REPOSITORY / "services")]

from tasuki.memory.layout import GB, Checkpointing, Layout, Part  # noqa: E402
from tasuki.memory.plan import TRAINER_TAGS, PlanStage, plan  # noqa: E402
from tasuki.memory.presets import MODELS  # noqa: E402

SIZES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b")
NUM_TOKENS, NUM_STEPS = 8192, 3


def layout_of(size: str, *, gpu_bytes: int, device: str) -> Layout:
    """What `measure` runs. Half of every sample are completion tokens; one micro-batch a call, so no gradients stay whole."""
    shape = MODELS[size]
    if device == "cpu":
        tiny = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "head_dim": 16, "vocab_size": 512}
        shape = replace(shape, **tiny)
    num_tokens = 64 if device == "cpu" else NUM_TOKENS
    return Layout(
        model=shape, num_gpus=1, gpu_bytes=gpu_bytes, host_bytes=2000 * GB, num_ranks=1, device="cpu" if device == "cpu" else "cuda",
        micro_batch_tokens=num_tokens, logit_tokens=num_tokens // 2, checkpointing=Checkpointing.FULL, accumulates=False,
    )  # fmt: skip


def make_model(folder: Path, layout: Layout, device: str) -> None:
    """A Hugging Face folder with random weights, in bfloat16."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = layout.model
    config = Qwen2Config(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, vocab_size=shape.vocab_size,
        max_position_embeddings=shape.context_length, tie_word_embeddings=shape.is_tied, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def measure(folder: Path, layout: Layout, device: str) -> dict[str, Any]:
    """Bytes by stage and kind, and the tags' bytes."""
    from tasuki.config.schema import NodeConfig
    from tasuki.trainer.memory import TAGS
    from tasuki.trainer.mesh import start_mesh
    from tasuki.trainer.micro_batch import loss_batch
    from tasuki.trainer.worker import PolicyLossConfig, Worker
    from tasuki.v1.types_pb2 import TrainingSample

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
    mesh = start_mesh(device, local_rank=0, num_threads=1, timeout_s=60)
    trainer = {"gradient_checkpointing": True, "micro_batch_tokens": layout.micro_batch_tokens}
    node = {"state_dir": folder / "state", "device": device, "model": {"path": folder}, "trainer": trainer}
    worker = Worker(NodeConfig.model_validate(node), mesh=mesh)
    # A sample is one token longer than what it puts into the model, since nothing is predicted from its last one.
    half = layout.micro_batch_tokens // 2
    tokens = torch.randint(layout.model.vocab_size, (2 * half + 1,)).tolist()
    sample = TrainingSample(
        prompt_token_ids=tokens[: half + 1],
        completion_token_ids=tokens[half + 1 :],
        rollout_log_probs=[-11.0] * half,
        advantages=[1.0] * half,
    )
    batch = loss_batch([sample], policy_version=0, device=worker.device)
    for _ in range(NUM_STEPS):
        worker.forward_backward([batch], loss=PolicyLossConfig(), num_loss_tokens=half, num_gap_tokens=half)
        worker.optim_step(learning_rate=1e-6)
    tags = {usage.tag: usage.total_bytes for usage in worker.memory.usage()}
    # The tags' blocks are torch's too; what a step adds to them lies in torch's own pool.
    stages = {
        PlanStage.TRAIN: {"allocated": sum(tags.values()) + step_bytes(worker.memory, device), "driver": used_bytes(device)}
    }
    worker.publish_weights()
    stages[PlanStage.LOAD_WEIGHTS] = {"driver": used_bytes(device)}
    worker.memory.pause(TAGS)
    stages[PlanStage.OFFLOAD] = {"driver": used_bytes(device)}
    worker.memory.resume(TAGS)
    worker.memory.wait_for_optimizer()
    stages[PlanStage.LOAD_TRAINER] = {"driver": used_bytes(device)}
    worker.close()
    return {"tags": tags, "stages": stages if device == "cuda" else {}}


def step_bytes(memory: Any, device: str) -> int:
    """The most that a step took beside the tags; 0 on a CPU."""
    if device == "cpu":
        return 0
    blocks = sum(size for tag in memory._allocator.tags for _, size in memory._allocator.blocks(tag))
    return torch.cuda.max_memory_allocated() - blocks


def used_bytes(device: str) -> int:
    """All that is taken of the device, by whomever; 0 on a CPU."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def compare(size: str, layout: Layout, measured: dict[str, Any]) -> list[str]:
    """Lines of the table; `measured` gets the predictions and errors. The engine has no process here, so its context does not count."""
    planned, lines = plan(layout), []
    contexts = layout.overheads.trainer_context + layout.overheads.nccl
    for part, tag in zip(TRAINER_TAGS, ("weights", "gradients", "optimizer"), strict=True):
        predicted = planned.stage(PlanStage.LOAD_TRAINER).gpus[0][part]
        lines.append(row(size, f"tag {tag}", "arena", predicted, measured["tags"][tag]))
    for stage, kinds in measured["stages"].items():
        parts = planned.stage(PlanStage(stage)).gpus[0]
        # Nothing is published before the first LOAD_WEIGHTS.
        absent = {Part.CONTEXTS, Part.ROLLOUT_WEIGHTS, *([Part.EXPORT] if stage == PlanStage.TRAIN else [])}
        own = sum(num_bytes for part, num_bytes in parts.items() if part not in absent)
        for kind, num_bytes in kinds.items():
            predicted = own + (contexts if kind == "driver" else 0)
            lines.append(row(size, stage, kind, predicted, num_bytes))
            measured.setdefault("errors", {})[f"{stage} {kind}"] = predicted / num_bytes - 1
    return lines


def row(size: str, stage: str, kind: str, predicted: int, measured: int) -> str:
    return f"{size:13s} {stage:14s} {kind:10s} {predicted / GB:9.3f} {measured / GB:9.3f} {100 * (predicted / measured - 1):+7.1f} %"


def run_part(size: str, device: str, gpu_bytes: int) -> dict[str, Any]:
    """In a process of its own, so that nothing else is on the device."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", size, "--device", device, "--gpu-bytes", str(gpu_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not answers:
        raise SystemExit(f"{size} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(answers[-1].removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--part", choices=SIZES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu-bytes", type=int)
    arguments = parser.parse_args()
    device = "cpu" if arguments.tiny else arguments.device
    if arguments.part is not None:
        layout = layout_of(arguments.part, gpu_bytes=arguments.gpu_bytes, device=device)
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), layout, device)
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            print("RESULT " + json.dumps(measure(Path(folder), layout, device)), flush=True)
        os._exit(0)
    gpu_bytes = torch.cuda.mem_get_info()[1] if device == "cuda" else GB
    results, lines = {}, [f"{'model':13s} {'stage':14s} {'what':10s} {'predicted':>9s} {'measured':>9s}   error (GB)"]
    for size in arguments.sizes:
        results[size] = run_part(size, device, gpu_bytes)
        lines += compare(size, layout_of(size, gpu_bytes=gpu_bytes, device=device), results[size])
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = {"gpu": torch.cuda.get_device_name() if device == "cuda" else "none", "torch": torch.__version__}
    (arguments.out / "plan_gpu.json").write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
