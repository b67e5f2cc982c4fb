"""Run by the launcher: steps of a critic beside a policy with adapters, in micro-batches of several sizes; rank 0 writes the results.

python -m tasuki.trainer.launch --num-ranks N -- tests/integration/critic_steps.py OUTPUT_FOLDER MODEL_FOLDER MAX_TOKENS...
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.trainer.launch import read_launch
from tasuki.trainer.replicas import start_mesh
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tests.integration.learning import learn, micro_batches, start_learner, whole_gradients, whole_parameters, with_denominator
from tests.integration.plain_critic import SETTINGS, SHARED, VALUE_CLIP, value_samples

NUM_SAMPLES, NUM_STEPS = 17, 3


def run_steps(model: Path, *, max_tokens: int, output: Path, mesh: DeviceMesh) -> None:
    learner = start_learner(model, mesh=mesh, lora={"rank": 4}, critic=SETTINGS, **SHARED)
    samples = decode_samples(value_samples(NUM_SAMPLES))
    config = with_denominator(LossConfig(loss=ValueLoss(clip=VALUE_CLIP)), samples)
    batches = micro_batches(learner, samples, config=config, max_tokens=max_tokens)
    facts = {"losses": [], "grad_norms": [], "num_micro_batches": len(batches)}
    tensors = {}
    policy = whole_parameters(learner, Role.POLICY)
    # In the order of the call; only a rank that holds all samples returns every value.
    everything = micro_batches(learner, samples, config=config, max_tokens=4096)
    facts["values"] = learner.score(Role.CRITIC, [batch.tokens for batch in everything])[0].tolist()
    for _ in range(NUM_STEPS):
        facts["losses"].append(learn(learner, Role.CRITIC, samples, config=config, max_tokens=max_tokens).loss)
        tensors = {f"gradient.{name}": tensor for name, tensor in whole_gradients(learner, Role.CRITIC).items()}
        facts["grad_norms"].append(learner.optim_step(Role.CRITIC).grad_norm)
    tensors |= {f"parameter.{name}": tensor for name, tensor in whole_parameters(learner, Role.CRITIC).items()}
    after = whole_parameters(learner, Role.POLICY)
    facts["is_policy_equal"] = all(bool((after[name] == before).all()) for name, before in policy.items())
    facts["versions"] = {role: state.version for role, state in learner.roles.items()}
    if dist.get_rank() == 0:
        save_file(tensors, output / f"{max_tokens}.safetensors")
        (output / f"{max_tokens}.json").write_text(json.dumps(facts))


def main(output: str, model: str, *budgets: str) -> None:
    mesh = start_mesh("cpu", launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    for max_tokens in budgets:
        run_steps(Path(model), max_tokens=int(max_tokens), output=Path(output), mesh=mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
