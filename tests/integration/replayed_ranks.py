"""Run by the launcher: one step for every combination of settings, with samples whose experts are given; rank 0 writes the results.

python -m tasuki.trainer.launch --num-ranks N -- tests/integration/replayed_ranks.py OUTPUT_FOLDER CASES
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from tasuki.models.families import read_model_shape
from tasuki.models.routes import RouteShape
from tasuki.trainer.launch import read_launch
from tasuki.trainer.replicas import start_mesh
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tasuki.v1.types_pb2 import TrainingSample, VersionSpan
from tests.integration import trainer_samples as plain
from tests.integration.learning import learn, metric, start_learner, whole_gradients
from tests.models import VOCAB_SIZE

NUM_GROUPS, GROUP_SIZE = 4, 3


def routed_samples(shape: RouteShape) -> tuple[list[TrainingSample], list[NDArray[np.int64]]]:
    """Groups with one prompt each, drawn by two versions, and the experts of their tokens, [tokens - 1, sparse layers, K], at random."""
    samples = plain.make_samples(NUM_GROUPS * GROUP_SIZE, vocab_size=VOCAB_SIZE, temperature=plain.TEMPERATURE)
    generator, routes = np.random.default_rng(7), list[NDArray[np.int64]]()
    num_chosen, num_layers = shape.experts_per_token, shape.num_layers

    def rows(num_tokens: int) -> NDArray[np.int64]:
        scores = generator.random((num_tokens, num_layers, shape.num_experts))
        return scores.argsort(-1)[..., :num_chosen]

    prompts = [(generator.integers(3, VOCAB_SIZE, size=12 + group), rows(12 + group)) for group in range(NUM_GROUPS)]
    for index, sample in enumerate(samples):
        token_ids, prompt_rows = prompts[index % NUM_GROUPS]
        num_tokens = len(sample.completion_token_ids)
        sample.prompt_token_ids[:] = token_ids.tolist()
        sample.policy_version = 0
        if num_tokens > 1:
            spans = ((1, 0), (num_tokens - 1, 0))
            sample.version_spans.extend(VersionSpan(num_tokens=num, policy_version=version) for num, version in spans)
        whole = np.concatenate([prompt_rows, rows(num_tokens - 1)])
        sample.routed_experts = whole.astype(shape.dtype).tobytes()
        routes.append(whole[:, shape.sparse_layers])
    return samples, routes


def run_step(case: dict[str, Any], *, output: Path, mesh: DeviceMesh) -> None:
    """case: the model's folder, settings of [trainer], and whether the samples carry their experts."""
    learner, model = start_learner(Path(case["model"]), mesh=mesh, **case["settings"]), read_model_shape(Path(case["model"]))
    shape = RouteShape.of(model)
    assert shape is not None
    samples = decode_samples(routed_samples(shape)[0], routes=shape if case["is_replayed"] else None)
    # The auxiliary loss is over what all ranks compute at once.
    max_tokens = 4096 if "router_aux_loss_coef" in case["settings"] else 64
    report = learn(learner, Role.POLICY, samples, config=plain.LOSS, max_tokens=max_tokens)
    gradients = whole_gradients(learner, Role.POLICY)
    learner.backend.close()
    if dist.get_rank() == 0:
        save_file(gradients, output.with_suffix(".safetensors"))
        metrics = {name: metric(report, name) for name in report.metrics}
        output.with_suffix(".json").write_text(json.dumps({"loss": report.loss, "metrics": metrics}))


def main(output: str, cases: str) -> None:
    mesh = start_mesh("cpu", launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    for index, case in enumerate(json.loads(cases)):
        run_step(case, output=Path(output) / str(index), mesh=mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
