"""Run by the launcher: one optimizer step of every model, in micro-batches of several sizes; rank 0 writes what came out.

python -m tasuki.trainer.launch --num-ranks N -- tests/integration/trainer_steps.py OUTPUT_FOLDER MODEL_FOLDER:MAX_TOKENS...
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from tasuki.trainer.worker import PolicyLossConfig, Worker
from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.schema import NodeConfig
from tasuki.trainer.backends.fsdp.mesh import start_mesh
from tasuki.trainer.data.checks import count_loss_tokens, plan_micro_batches, sample_length
from tasuki.trainer.data.micro_batch import loss_batch
from tasuki.trainer.launch import read_launch
from tests.integration import trainer_samples as plain
from tests.models import VOCAB_SIZE

NUM_SAMPLES = 23


def run_step(model: Path, *, max_tokens: int, output: Path, mesh: DeviceMesh) -> None:
    trainer = {
        "num_ranks": mesh.size(),
        "compute_dtype": "float32",
        "learning_rate": plain.LEARNING_RATE,
        "eps": plain.EPS,
        "weight_decay": plain.WEIGHT_DECAY,
        "max_grad_norm": plain.MAX_GRAD_NORM,
        # It changes what is kept for backward, so it may not change a result.
        "gradient_checkpointing": max_tokens == plain.CHECKPOINTED_MAX_TOKENS,
    }
    node = NodeConfig.model_validate({"state_dir": output, "model": {"path": model}, "trainer": trainer})
    worker = Worker(node, mesh=mesh)
    samples = plain.make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)
    plan = plan_micro_batches([sample_length(sample) for sample in samples], num_ranks=mesh.size(), max_tokens=max_tokens)
    num_tokens = count_loss_tokens(samples)
    report = worker.forward_backward(
        [
            loss_batch([samples[index] for index in part], policy_version=0, device=worker.device)
            for part in plan[dist.get_rank()]
        ],
        loss=PolicyLossConfig(
            clip_low=plain.CLIP_LOW, clip_high=plain.CLIP_HIGH, kl_coef=plain.KL_COEF, temperature=plain.TEMPERATURE
        ),
        num_loss_tokens=num_tokens,
        num_gap_tokens=num_tokens,
    )
    tensors = {f"gradient.{name}": param.grad.full_tensor() for name, param in worker.policy.causal_lm.named_parameters()}
    step = worker.optim_step(learning_rate=None)
    tensors |= {f"parameter.{name}": param.detach().full_tensor() for name, param in worker.policy.causal_lm.named_parameters()}
    reports: list[dict[str, float] | None] = [None] * mesh.size()
    dist.all_gather_object(reports, dataclasses.asdict(report))
    if dist.get_rank() == 0:
        stem = f"{model.name}-{max_tokens}"
        save_file(tensors, output / f"{stem}.safetensors")
        facts = {"reports": reports, "grad_norm": step.grad_norm, "num_micro_batches": len(plan[0])}
        (output / f"{stem}.json").write_text(json.dumps(facts))


def main(output: str, *cases: str) -> None:
    mesh = start_mesh("cpu", launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    for case in cases:
        model, _, max_tokens = case.rpartition(":")
        run_step(Path(model), max_tokens=int(max_tokens), output=Path(output), mesh=mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
