"""Run by the launcher: scores of a reference on the device and on the host; rank 0 writes, by model, whether they are equal."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.launch import read_launch
from tasuki.trainer.replicas import start_mesh
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tests.integration.learning import start_learner
from tests.integration.plain_critic import value_samples


def main(output: str, *models: str) -> None:
    mesh = start_mesh("cpu", launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    samples = decode_samples(value_samples(9))
    equal: list[bool] = []
    for model in map(Path, models):
        learners = [start_learner(model, mesh=mesh, reference_on_host=on_host) for on_host in (False, True)]
        batch = token_batch(samples, device=learners[0].backend.device)
        here, there = (learner.score(Role.REFERENCE, [batch, batch]) for learner in learners)
        equal.append(all(torch.equal(*pair) for pair in zip(here, there, strict=True)))
    if dist.get_rank() == 0:
        (Path(output) / "equal").write_text(" ".join(map(str, equal)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
