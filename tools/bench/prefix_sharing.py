"""A training step with and without sharing of prompts, on a CPU: `python -m tools.bench.prefix_sharing [--prompt 1024] [--completion 128]`.

One group of samples, a Llama of 4 layers in float32 through the learner and FSDP2 as the service runs them, one thread. Steps of both kinds
take turns in one process. Prints JSON: seconds of forward and backward, their medians' ratio, and how far gradients differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tasuki.v1.types_pb2 import TrainingSample
from tests.integration.learning import micro_batches, start_learner, whole_gradients, with_denominator
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
MAX_TOKENS = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompt", 1024), ("completion", 128), ("samples", 8), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    generator = np.random.default_rng(0)
    prompt = generator.integers(VOCAB_SIZE, size=arguments.prompt).tolist()
    samples = decode_samples(
        [
            TrainingSample(
                prompt_token_ids=prompt,
                completion_token_ids=generator.integers(VOCAB_SIZE, size=arguments.completion).tolist(),
                rollout_log_probs=[-5.0] * arguments.completion,
                advantages=[float(generator.normal())],
            )
            for _ in range(arguments.samples)
        ]
    )
    config = with_denominator(LossConfig(), samples)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama", seed=0, max_position_embeddings=MAX_TOKENS, **SIZES)
        path = save_checkpoint(model, Path(folder) / "model")
        learners = {
            is_shared: start_learner(path, mesh=mesh, micro_batch_tokens=MAX_TOKENS, prefix_sharing=is_shared)
            for is_shared in seconds
        }
        batches = {
            is_shared: micro_batches(learner, samples, config=config, max_tokens=MAX_TOKENS)
            for is_shared, learner in learners.items()
        }
        for step in range(arguments.steps + 1):
            for is_shared, learner in learners.items():
                learner.discard_gradients(Role.POLICY)
                started = time.process_time()
                learner.forward_backward(Role.POLICY, batches[is_shared], config=config)
                if step:
                    seconds[is_shared].append(time.process_time() - started)
        alone, shared = (whole_gradients(learners[is_shared], Role.POLICY) for is_shared in (False, True))
        difference = max(float((shared[name] - exact).norm() / exact.norm()) for name, exact in alone.items())
    medians = {is_shared: statistics.median(each) for is_shared, each in seconds.items()}
    result = {
        **{name: getattr(arguments, name) for name in ("prompt", "completion", "samples")},
        "tokens": {str(is_shared): sum(len(each.tokens.input_ids_T) for each in own) for is_shared, own in batches.items()},
        "cpu_seconds": {str(is_shared): [round(each, 3) for each in own] for is_shared, own in seconds.items()},
        "ratio": round(medians[False] / medians[True], 2),
        "gradients_differ_by": difference,
    }
    print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
