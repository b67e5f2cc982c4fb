"""Peer side of `trainer_peers_gpu`: training steps of torchtitan's Qwen3 model with FSDP2, recomputation and compiler settings.

Runs one rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set. The shape is Qwen2.5's without its biases, which this model lacks.
The micro-batches are those of our plan, each padded to the longest, so that compiled code sees one shape. A single rank also runs under
FSDP2, as ranks of a larger world do; --autocast is torchtitan's choice for a single rank. Rank 0 prints RESULT and a JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed import parallel_dims

IGNORED, LEARNING_RATE, LARGEST_NORM = -100, 1e-6, 1.0


def without_datasets(family: str) -> None:
    """Makes modules of a model family importable without the package's `__init__`, which needs `datasets` and much else."""
    name = f"torchtitan.models.{family}"
    package = types.ModuleType(name)
    package.__path__ = [str(Path(torchtitan.__file__).parent / "models" / family)]
    sys.modules[name] = package


for each in ("qwen3", "llama3", "llama4"):
    without_datasets(each)
if not torch.cuda.is_available():
    parallel_dims.device_type = "cpu"  # defaults to "cuda"

from torchtitan.components.loss import build_cross_entropy_loss  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import clip_grad_norm_, maybe_enable_amp  # noqa: E402
from torchtitan.models.attention import VarlenMetadata  # noqa: E402
from torchtitan.models.llama4.infra.parallelize import apply_fsdp  # noqa: E402
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3  # noqa: E402
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs  # noqa: E402
from torchtitan.models.qwen3.model.model import Qwen3Model  # noqa: E402


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch of T positions, padded by its last segment."""

    tokens: torch.Tensor
    """[1, T]."""
    positions: torch.Tensor
    """[1, T]."""
    labels: torch.Tensor
    """[1, T]; IGNORED at positions without a loss."""
    masks: VarlenMetadata | None


def pack(lengths: Sequence[int], *, num_places: int, num_segments: int, longest: int, vocab_size: int, device: str) -> Packed:
    """Packs random tokens. The second half of each sample is its completion."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = torch.randint(vocab_size, (1, num_places), generator=generator)
    filled = [*lengths, num_places - sum(lengths)]
    positions = torch.cat([torch.arange(length) for length in filled])[None]
    learned = torch.cat([torch.arange(length) >= length - length // 2 for length in lengths] + [torch.zeros(filled[-1]).bool()])
    labels = torch.where(learned, torch.randint(vocab_size, (num_places,), generator=generator), IGNORED)[None]
    ends = torch.tensor([0, *filled]).cumsum(0)
    ends = torch.cat([ends, ends[-1:].expand(num_segments + 2 - len(ends))]).to(device, torch.int32)
    masks = None if device == "cpu" else VarlenMetadata(ends, ends, longest, longest)
    return Packed(tokens.to(device), positions.to(device), labels.to(device), masks)


def make_model(work: dict[str, Any], job: JobConfig, dims: ParallelDims, *, device: str, is_sharded: bool) -> torch.nn.Module:
    """is_sharded: whether to use FSDP2, even on a single rank."""
    shape, longest = work["shape"], work["num_places"]
    arguments = Qwen3ModelArgs(
        dim=shape["hidden_size"],
        n_layers=shape["num_layers"],
        n_heads=shape["num_heads"],
        n_kv_heads=shape["num_kv_heads"],
        vocab_size=shape["vocab_size"],
        head_dim=shape["head_dim"],
        hidden_dim=shape["intermediate_size"],
        qk_norm=False,
        max_seq_len=longest,
        enable_weight_tying=shape["is_tied"],
        attn_type="sdpa" if device == "cpu" else "varlen",
        attn_mask_type="causal" if device == "cpu" else "block_causal",
    )
    with torch.device("meta"):
        model = Qwen3Model(arguments)
    model = parallelize_qwen3(model, dims, job)
    if is_sharded and not dims.fsdp_enabled:
        mesh = init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))
        apply_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    return model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="JSON: shape, plan (lengths by rank and micro-batch), num_places, steps")
    parser.add_argument("model", type=Path, help="not read")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="without FSDP2; one rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments = parser.parse_args()
    work, device, rank = json.loads(arguments.work.read_text()), arguments.device, int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    job = JobConfig()
    job.training.seq_len = work["num_places"]
    job.training.mixed_precision_param, job.training.mixed_precision_reduce = "bfloat16", "float32"
    job.activation_checkpoint.mode = arguments.recompute
    job.activation_checkpoint.selective_ac_option = "op"
    job.compile.enable = arguments.compile
    started, world = time.perf_counter(), dist.get_world_size()
    dims = ParallelDims(dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=world)
    model = make_model(work, job, dims, device=device, is_sharded=not arguments.autocast)
    precision = maybe_enable_amp(dims, "bfloat16", device) if arguments.autocast else nullcontext()
    loss_of = build_cross_entropy_loss(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    plan = work["plan"]
    everywhere = [part for parts in plan for part in parts]
    facts = {
        "num_places": work["num_places"],
        "num_segments": max(len(part) for part in everywhere) + 1,
        "longest": max(max(*part, work["num_places"] - sum(part)) for part in everywhere),
        "vocab_size": work["shape"]["vocab_size"],
    }
    batches = [pack(lengths, **facts, device=device) for lengths in plan[rank]]
    denominator = sum(length // 2 for part in everywhere for length in part)
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(work["steps"]):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        total = torch.zeros((), device=device)
        for batch in batches:
            with precision:
                loss = loss_of(model(batch.tokens, attention_masks=batch.masks, positions=batch.positions), batch.labels)
            (loss / denominator).backward()  # torchtitan has FSDP2 sum gradients over ranks
            total += loss.detach()
        clip_grad_norm_(model.parameters(), LARGEST_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / denominator)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    tokens = sum(length for part in everywhere for length in part)
    step_s = statistics.median(seconds[1:])
    result = {
        "side": "torchtitan",
        "recompute": arguments.recompute,
        "compile": arguments.compile,
        "autocast": arguments.autocast,
        "micro_batch_places": work["num_places"],
        "start_s": round(sum(seconds[:1]) + begun - started - sum(seconds[:-1]), 1),
        "seconds": [round(each, 3) for each in seconds],
        "tokens_per_s": round(tokens / step_s / world),
        "losses": losses,
    }
    if device == "cuda":
        free, total_bytes = torch.cuda.mem_get_info()
        result |= {"allocated_bytes": torch.cuda.max_memory_allocated(), "driver_bytes": total_bytes - free}
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # skip the process group's shutdown


if __name__ == "__main__":
    main()
