"""Run by the launcher: losses and gradient norms of 20 steps from one seed under each setting; rank 0 writes them.

python -m tasuki.trainer.launch --num-ranks N -- tests/integration/curve_ranks.py OUTPUT_FOLDER MODEL_FOLDER...
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.launch import read_launch
from tasuki.trainer.replicas import start_mesh
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tests.integration.learning import learn, start_learner
from tests.integration.test_prefix_sharing import grouped_samples

NUM_STEPS = 20
MAX_TOKENS = 64
SETTINGS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "default": {},
        "one micro-batch": {"max_tokens": 4096},
        "checkpointing = attention": {"checkpointing": "attention"},
        "checkpointing = full": {"checkpointing": "full"},
        "checkpointing = offloaded": {"checkpointing": "offloaded"},
        "moments = host": {"moments": "host"},
        "mlp_tile_tokens = 16": {"mlp_tile_tokens": 16},
        "prefix_sharing": {"prefix_sharing": True},
        "moments = 8bit": {"moments": "8bit"},
    },
    2: {"two ranks": {}, "sequence_parallel = 2": {"sequence_parallel": 2}},
}
"""Settings by number of ranks. All but `max_tokens` belong to the table [trainer]."""


def curve(model: Path, *, mesh: DeviceMesh, max_tokens: int = MAX_TOKENS, **trainer: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    given = {"learning_rate": 1e-3, "micro_batch_tokens": 4096, "checkpointing": "none", **trainer}
    learner = start_learner(model, mesh=mesh, **given)
    samples, steps = decode_samples(grouped_samples()), list[tuple[float, float]]()
    for _ in range(NUM_STEPS):
        loss = learn(learner, Role.POLICY, samples, config=LossConfig(), max_tokens=max_tokens).loss
        steps.append((loss, learner.optim_step(Role.POLICY).grad_norm))
    return steps


def main(output: str, *models: str) -> None:
    mesh = start_mesh("cpu", launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    for model in map(Path, models):
        curves = {name: curve(model, mesh=mesh, **settings) for name, settings in SETTINGS[mesh.size()].items()}
        if dist.get_rank() == 0:
            (Path(output) / f"{model.name}-{mesh.size()}.json").write_text(json.dumps(curves))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
