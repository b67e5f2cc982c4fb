"""The planner against GPUs: `python tools/bench/plan_gpu.py [--out FOLDER] [--sizes qwen2.5-0.5b ...] [--ranks N] [--micro-batches N]`.

N FSDP2 ranks per size, on as many GPUs; sizes that do not fit by the plan are left out (7B takes two GPUs of 141 GB). Random weights,
float32 masters, AdamW, bfloat16 compute, full checkpointing. Each size runs ForwardBackward of N micro-batches and OptimStep three times,
then a publish, and a pause and resume of all tags. For each stage on rank 0 the table has predicted bytes, measured bytes and the error.
Measured are the peak of torch's allocator in training, else the driver's figure. Writes plan_gpu.json and prints a table. With --tiny it
runs on a CPU: tags only.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = [str(REPOSITORY / "protos"), str(REPOSITORY / "services"), str(REPOSITORY)]
sys.path[:0] = SOURCES

from tasuki.planner.node import GB, Checkpointing, Node, Part  # noqa: E402
from tasuki.planner.plan import NCCL, TRAINER_CONTEXT, TRAINER_TAGS, plan  # noqa: E402
from tasuki.planner.presets import MODELS  # noqa: E402
from tasuki.wire.stages import MemoryTag, Phase, Stage  # noqa: E402
from tests.planned import node_with  # noqa: E402
from tools.bench.gpus import at_least_one, require_gpus  # noqa: E402

SIZES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b")
SHAPES = MODELS | {"qwen2.5-7b-8-layers": replace(MODELS["qwen2.5-7b"], num_layers=8)}
SHAPES |= {f"qwen3-moe-{num}-layers": replace(MODELS["qwen3-30b-a3b"], num_layers=num) for num in (8, 12)}
"""Benchmark sizes, with fewer layers of two; 12 of the MoE model have 8.1 billion parameters, and fit two GPUs of 141 GB."""
NUM_TOKENS, NUM_STEPS = 8192, 3
STAGES = (Phase.TRAIN, Stage.LOAD_WEIGHTS, Stage.OFFLOAD, Stage.LOAD_TRAINER)


def node_for(size: str, *, gpu_bytes: int, device: Literal["cpu", "cuda"], num_ranks: int) -> Node:
    """Node of the job that `measure` runs. Half of each sample's tokens are completion tokens."""
    shape = SHAPES[size]
    if device == "cpu":
        tiny = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "head_dim": 16, "vocab_size": 512}
        few = {"num_experts": 8, "experts_per_token": 2, "expert_size": 32} if shape.num_experts else {}
        shape = replace(shape, **tiny, **few)
    num_tokens = 64 if device == "cpu" else NUM_TOKENS
    return node_with(
        shape, num_ranks=num_ranks, gpu_bytes=gpu_bytes, device=device,
        micro_batch_tokens=num_tokens, logit_tokens=num_tokens // 2, checkpointing=Checkpointing.FULL,
    )  # fmt: skip


def make_model(folder: Path, node: Node, device: str) -> None:
    """Writes a Hugging Face folder with random weights, in bfloat16."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

    shape = node.model
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads, "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length, "tie_word_embeddings": shape.is_tied, "dtype": torch.bfloat16,
    }  # fmt: skip
    experts = {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_size,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**sizes, **experts, head_dim=shape.head_dim) if shape.num_experts else Qwen2Config(**sizes)
    with torch.device(device):
        # Saving copies all tensors of a file to the host at once.
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="8GB")


def make_model_apart(folder: Path, node: Node, device: str) -> None:
    """Makes the model in a child process, whose CUDA context would otherwise count as memory in use."""
    maker = multiprocessing.get_context("spawn").Process(target=make_model, args=(folder, node, device))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise SystemExit(f"the model was not made: exit code {maker.exitcode}")


def measure(folder: Path, node: Node, device: str, num_micro_batches: int) -> dict[str, Any]:
    """Returns predicted bytes by stage and kind, and those of the tags."""
    from tasuki.algorithms.loss_types import LossConfig
    from tasuki.trainer.data.micro_batch import micro_batch
    from tasuki.trainer.launch import read_launch
    from tasuki.trainer.replicas import start_mesh
    from tasuki.trainer.resident_tags import TAGS
    from tasuki.trainer.service.requests import decode_samples
    from tasuki.trainer.wire import Role
    from tasuki.v1.types_pb2 import TrainingSample
    from tests.integration.learning import fsdp, start_learner

    launch = read_launch(os.environ)
    mesh = start_mesh(device, launch=launch, gpu=launch.local_rank, num_threads=1, timeout_s=60)
    learner = start_learner(
        folder,
        mesh=mesh,
        compute_dtype="bfloat16",
        checkpointing="full",
        micro_batch_tokens=node.micro_batch_tokens,
    )
    memory = fsdp(learner).memory
    # A sample is one token longer than the model's input: nothing is predicted from its last token.
    half = node.micro_batch_tokens // 2
    tokens = torch.randint(node.model.vocab_size, (2 * half + 1,)).tolist()
    sample = TrainingSample(
        prompt_token_ids=tokens[: half + 1],
        completion_token_ids=tokens[half + 1 :],
        rollout_log_probs=[-11.0] * half,
        advantages=[1.0] * half,
    )
    config = LossConfig(denominator=half * num_micro_batches)
    batch = micro_batch(decode_samples([sample]), config=config, policy_version=0, device=learner.backend.device)
    for _ in range(NUM_STEPS):
        learner.forward_backward(Role.POLICY, [batch] * num_micro_batches, config=config)
        learner.optim_step(Role.POLICY, learning_rate=1e-6)
    tags = {MemoryTag.of(usage.tag): usage.total_bytes for usage in memory.usage()}
    # The tags' blocks are torch's too; memory that a step adds lies in torch's own pool.
    stages = {Phase.TRAIN: {"allocated": sum(tags.values()) + step_bytes(memory, device), "driver": used_bytes(device)}}
    learner.publish()
    stages[Stage.LOAD_WEIGHTS] = {"driver": used_bytes(device)}
    memory.pause_tags(TAGS)
    stages[Stage.OFFLOAD] = {"driver": used_bytes(device)}
    memory.resume_tags(TAGS)
    memory.wait_for_content()
    stages[Stage.LOAD_TRAINER] = {"driver": used_bytes(device)}
    learner.backend.close()
    return {"tags": tags, "stages": stages if device == "cuda" else {}}


def step_bytes(memory: Any, device: str) -> int:
    """Peak bytes of a step beside the tags; 0 on a CPU."""
    if device == "cpu":
        return 0
    blocks = sum(size for tag in memory._allocator.tags for _, size in memory._allocator.blocks(tag))
    return torch.cuda.max_memory_allocated() - blocks


def used_bytes(device: str) -> int:
    """Bytes in use on the device, by any process; 0 on a CPU."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def predict(node: Node) -> dict[tuple[str, str], int]:
    """Bytes of a trainer alone, by stage and kind. There is no engine process, so no context of one."""
    planned, contexts = plan(node), TRAINER_CONTEXT + NCCL
    predicted: dict[tuple[str, str], int] = {}
    for stage in STAGES:
        # Nothing is published before the first LOAD_WEIGHTS.
        absent = {Part.CONTEXTS, Part.ROLLOUT_WEIGHTS, Part.ENGINE_STEP, *([Part.EXPORT] if stage is Phase.TRAIN else [])}
        parts = {part: size for part, size in planned.stage(stage).gpus[0].items() if part not in absent}
        predicted[stage, "driver"] = sum(parts.values()) + contexts
        predicted[stage, "allocated"] = sum(parts.values()) - parts.get(Part.TORCH_CACHE, 0)
    return predicted


def compare(size: str, node: Node, measured: dict[str, Any]) -> list[str]:
    """Returns the lines of the table, and adds the errors to `measured`."""
    planned, predicted, lines = plan(node), predict(node), []
    for part, tag in zip(TRAINER_TAGS, ("weights", "gradients", "optimizer"), strict=True):
        of_tag = planned.stage(Stage.LOAD_TRAINER).gpus[0][part]
        lines.append(row(size, f"tag {tag}", "arena", of_tag, measured["tags"][tag]))
    for stage, kinds in measured["stages"].items():
        for kind, num_bytes in kinds.items():
            lines.append(row(size, stage, kind, predicted[stage, kind], num_bytes))
            measured.setdefault("errors", {})[f"{stage} {kind}"] = predicted[stage, kind] / num_bytes - 1
    return lines


def row(size: str, stage: str, kind: str, predicted: int, measured: int) -> str:
    return f"{size:13s} {stage:14s} {kind:10s} {predicted / GB:9.3f} {measured / GB:9.3f} {100 * (predicted / measured - 1):+7.1f} %"


def run_part(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs every rank in a separate process, alone on its device, and returns rank 0's measurements. The model is made first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(__file__).resolve()),
            "--part",
            size,
            "--ranks",
            str(arguments.ranks),
            "--micro-batches",
            str(arguments.micro_batches),
            "--folder",
            folder,
        ]
        command += ["--tiny"] if arguments.tiny else []
        makes = subprocess.run([sys.executable, *command, "--make"], capture_output=True, text=True, check=False)
        if makes.returncode != 0:
            raise SystemExit(f"{size} was not made:\n{makes.stderr[-4000:]}")
        launch = [sys.executable, "-m", "tasuki.trainer.launch", "--num-ranks", str(arguments.ranks), "--"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])}
        ranks = subprocess.run([*launch, *command], env=environment, capture_output=True, text=True, check=False)
    answers = [line for line in ranks.stdout.splitlines() if line.startswith("RESULT ")]
    if ranks.returncode or not answers:
        raise SystemExit(f"{size} failed:\n{ranks.stdout[-4000:]}{ranks.stderr[-4000:]}")
    return json.loads(answers[-1].removeprefix("RESULT "))


def gpu() -> tuple[str, int]:
    """Returns name and bytes of the first GPU, without creating a CUDA context that would take some of them."""
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    return nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle).total


def work(arguments: argparse.Namespace, node: Node, device: str) -> None:
    """Runs one child process, which makes the model or is a rank."""
    if arguments.make:
        make_model(arguments.folder, node, device)
    else:
        measured = measure(arguments.folder, node, device, arguments.micro_batches)
        if os.environ["RANK"] == "0":
            print("RESULT " + json.dumps(measured), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--ranks", type=at_least_one, default=1)
    parser.add_argument("--micro-batches", type=at_least_one, default=1, help="of each call")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--part", choices=SIZES)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--make", action="store_true")
    arguments = parser.parse_args()
    if arguments.part is not None and arguments.folder is None:
        parser.error("--part needs --folder")
    device = "cpu" if arguments.tiny else "cuda"
    if not arguments.tiny:
        require_gpus(arguments.ranks)
    gpu_name, gpu_bytes = ("none", GB) if arguments.tiny else gpu()
    nodes = {size: node_for(size, gpu_bytes=gpu_bytes, device=device, num_ranks=arguments.ranks) for size in SIZES}
    if arguments.part is not None:
        work(arguments, nodes[arguments.part], device)
    results: dict[str, Any] = {}
    lines = [f"{'model':13s} {'stage':14s} {'what':10s} {'predicted':>9s} {'measured':>9s}   error (GB)"]
    for size in arguments.sizes:
        peak = plan(nodes[size]).stage(Phase.TRAIN).gpu_bytes
        if device == "cuda" and peak > gpu_bytes:
            lines.append(f"{size:13s} left out: predicted {peak / GB:.1f} GB on {gpu_bytes / GB:.1f}; give it more --ranks")
            continue
        results[size] = run_part(size, arguments)
        lines += compare(size, nodes[size], results[size])
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = {
        "gpu": gpu_name,
        "torch": torch.__version__,
        "ranks": arguments.ranks,
        "micro_batches": arguments.micro_batches,
    }
    (arguments.out / "plan_gpu.json").write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
