"""Seconds of forward_backward, and of forward_backward_custom with the same loss in Python, in turns. Usage: custom_loss.py STATE_DIR"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from tasuki.client import Client, SamplingParams, TrainingSample

_ROUNDS = 20


def policy_gradient(samples: Sequence[TrainingSample], log_probs: Sequence[torch.Tensor]) -> torch.Tensor:
    """PPO's loss where the ratio is 1: a token mean."""
    flat_N = torch.cat(list(log_probs))
    advantages_N = torch.cat(
        [torch.tensor(one.advantages).expand(len(row)) for one, row in zip(samples, log_probs, strict=True)]
    )
    return -(advantages_N * (flat_N - flat_N.detach()).exp()).mean()


def _seconds(client: Client, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    client.discard_gradients()
    return seconds


def main() -> None:
    torch.set_num_threads(1)
    with Client(state_dir=sys.argv[1]) as client:
        prompts = [[5, 6, 7, 8, 3 + index % 8] for index in range(64)]
        samples = client.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True), num_samples=8)
        batch = [TrainingSample.of(sample, advantages=index % 3 - 1.0) for index, sample in enumerate(samples)]
        built_in: list[float] = []
        custom: list[float] = []
        for _ in range(_ROUNDS):
            built_in.append(_seconds(client, lambda: client.forward_backward(batch)))
            custom.append(_seconds(client, lambda: client.forward_backward_custom(batch, policy_gradient)))
        sys.stdout.write(f"samples={len(batch)} forward_backward_s={statistics.median(built_in):.3f} ")
        sys.stdout.write(f"custom_s={statistics.median(custom):.3f}\n")


if __name__ == "__main__":
    main()
