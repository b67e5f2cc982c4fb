"""Run by the launcher: gradients of one call, cut into micro-batches and into calls in several ways; rank 0 writes their differences.

python -m tasuki.trainer.launch --num-ranks N -- tests/integration/loss_cuts.py OUTPUT_FOLDER MODEL_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from tasuki.algorithms.loss_types import Aggregation, Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.cispo import CispoLoss
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.sapo import SapoLoss
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.trainer.backends.fsdp.mesh import start_mesh
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.launch import read_launch
from tasuki.trainer.learner import Learner
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tests.extent import IS_WHOLE
from tests.integration.learning import learn, metric, start_learner, whole_gradients, with_denominator
from tests.integration.plain_critic import value_samples

NUM_SAMPLES = 13
CORRECTION = Correction(token_truncation=1.05, token_mask=(0.5, 1.5), geometric_mask=(0.9, 1.1))
SEQUENCE_CORRECTION = Correction(token_truncation=None, sequence_truncation=1.1)
LOSSES = {
    "ppo": LossConfig(loss=PpoLoss(dual_clip=3.0), old_policy=OldPolicy.GIVEN, correction=CORRECTION, kl_coef=0.1),
    "gspo": LossConfig(
        loss=GspoLoss(clip_low=0.05, clip_high=0.05), old_policy=OldPolicy.GIVEN, correction=SEQUENCE_CORRECTION
    ),
    "cispo": LossConfig(loss=CispoLoss(clip_high=0.1), old_policy=OldPolicy.GIVEN, correction=CORRECTION, entropy_coef=0.01),
    "sapo": LossConfig(loss=SapoLoss(), old_policy=OldPolicy.GIVEN, correction=CORRECTION),
    "policy_gradient": LossConfig(loss=PolicyGradientLoss(), correction=CORRECTION),
    "sft": LossConfig(loss=SftLoss()),
    "value": LossConfig(loss=ValueLoss(clip=0.1)),
}
CASES = {
    f"{name}-{aggregation}": replace(
        config, aggregation=aggregation, aggregation_length=16 if aggregation is Aggregation.CONSTANT else None
    )
    for name, config in LOSSES.items()
    for aggregation in Aggregation
    if IS_WHOLE or name == "ppo" or aggregation is Aggregation.TOKEN_MEAN
}


def with_log_probs(learner: Learner, samples: Samples) -> Samples:
    """Places old log-probs near the policy's, and rollout's near those, so that ratios lie both inside and outside the clips."""
    scored_N = learner.score(Role.POLICY, [token_batch(samples, device=learner.backend.device)])[0].numpy()
    generator = np.random.default_rng(2)
    noise = [generator.normal(scale=0.15, size=len(scored_N)).astype(np.float32) for _ in range(3)]
    old_N = scored_N + noise[0]
    given = {"old_log_probs": old_N, "rollout_log_probs": old_N + noise[1], "ref_log_probs": scored_N + noise[2]}
    return replace(samples, columns={**samples.columns, **given})


def gradient(
    learner: Learner, role: Role, calls: Sequence[Samples], *, config: LossConfig, max_tokens: int
) -> tuple[Tensor, float]:
    """Returns the flat gradient of all calls together, and their loss. config: with the denominator of all calls."""
    loss = sum(learn(learner, role, samples, config=config, max_tokens=max_tokens).loss for samples in calls)
    whole = torch.cat([each.flatten() for each in whole_gradients(learner, role).values()])
    learner.discard_gradients(role)
    return whole, loss


def run_case(learner: Learner, name: str, samples: Samples) -> tuple[Tensor, dict[str, float]]:
    role = Role.CRITIC if name.startswith("value") else Role.POLICY
    config = with_denominator(CASES[name], samples)
    uncut, loss = gradient(learner, role, [samples], config=config, max_tokens=4096)
    three = [samples.select(part) for part in ([3, 0, 7, 12], [1, 2], [4, 5, 6, 8, 9, 10, 11])]
    cuts = {
        "small": gradient(learner, role, [samples], config=config, max_tokens=23),
        "middle": gradient(learner, role, [samples], config=config, max_tokens=64),
        "calls": gradient(learner, role, three, config=config, max_tokens=64),
    }
    report = learn(learner, role, samples, config=config)
    learner.discard_gradients(role)
    facts = {f"gradient.{cut}": float((one - uncut).norm() / uncut.norm()) for cut, (one, _) in cuts.items()}
    facts |= {f"loss.{cut}": abs(one - loss) for cut, (_, one) in cuts.items()}
    facts |= {f"metric.{each}": metric(report, each) for each in report.metrics}
    return uncut, facts | {"loss": loss, "norm": float(uncut.norm())}


def main(output: Path, model: Path) -> None:
    mesh = start_mesh("cpu", launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    learner = start_learner(model, mesh=mesh, critic={})
    samples = with_log_probs(learner, decode_samples(value_samples(NUM_SAMPLES)))
    done = {name: run_case(learner, name, samples) for name in CASES}
    if dist.get_rank() == 0:
        save_file({name: whole for name, (whole, _) in done.items()}, output / "gradients.safetensors")
        (output / "facts.json").write_text(json.dumps({name: facts for name, (_, facts) in done.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
