"""Run by the launcher: one optimizer step of every model, in micro-batches of several sizes; rank 0 writes the results.

python -m tasuki.trainer.launch --num-ranks N -- tests/integration/trainer_steps.py OUTPUT_FOLDER MODEL_FOLDER:MAX_TOKENS:SHARING...
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from tasuki.trainer.data.plan import plan_micro_batches
from tasuki.trainer.launch import read_launch
from tasuki.trainer.replicas import start_mesh
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tests.integration import trainer_samples as plain
from tests.integration.learning import COST, learn, metric, start_learner, whole_gradients, whole_parameters
from tests.models import VOCAB_SIZE
from tests.vision import put_images, take_images

NUM_SAMPLES = 23


def run_step(model: Path, *, max_tokens: int, sequence_parallel: int, output: Path, mesh: DeviceMesh) -> None:
    learner = start_learner(
        model,
        mesh=mesh,
        learning_rate=plain.LEARNING_RATE,
        eps=plain.EPS,
        weight_decay=plain.WEIGHT_DECAY,
        max_grad_norm=plain.MAX_GRAD_NORM,
        # Tensors kept for backward must not change a result.
        sequence_parallel=sequence_parallel,
        expert_parallel=model.name.endswith("_spread"),
        train_tower=model.name.endswith("_tower_images"),
        checkpointing="full" if max_tokens == plain.CHECKPOINTED_MAX_TOKENS else "none",
    )
    messages = plain.make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE, temperature=plain.TEMPERATURE)
    images = None
    if model.name.endswith("_images"):
        put_images(messages)
        images = take_images(messages)
    samples = replace(decode_samples(messages), images=images)
    report = learn(learner, Role.POLICY, samples, config=plain.LOSS, max_tokens=max_tokens)
    tensors = {f"gradient.{name}": tensor for name, tensor in whole_gradients(learner, Role.POLICY).items()}
    step = learner.optim_step(Role.POLICY)
    tensors |= {f"parameter.{name}": tensor for name, tensor in whole_parameters(learner, Role.POLICY).items()}
    if dist.get_rank() == 0:
        stem = f"{model.name}-{max_tokens}-{sequence_parallel}"
        save_file(tensors, output / f"{stem}.safetensors")
        lengths = samples.num_tokens_S.tolist()
        plan = plan_micro_batches(lengths, num_ranks=mesh.size() // sequence_parallel, max_tokens=max_tokens, cost=COST)
        metrics = {name: metric(report, name) for name in report.metrics}
        facts = {"metrics": metrics, "grad_norm": step.grad_norm, "num_micro_batches": len(plan[0])}
        (output / f"{stem}.json").write_text(json.dumps(facts))


def main(output: str, *cases: str) -> None:
    mesh = start_mesh("cpu", launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    for case in cases:
        model, *numbers = case.rsplit(":", 2)
        max_tokens, sequence_parallel = map(int, numbers)
        run_step(Path(model), max_tokens=max_tokens, sequence_parallel=sequence_parallel, output=Path(output), mesh=mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
