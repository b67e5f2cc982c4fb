"""Random micro-batches for the tests of losses, and parts of them."""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from tasuki.algorithms import aggregation
from tasuki.algorithms.batch import LossBatch
from tasuki.algorithms.loss_types import LossConfig

LENGTHS = (5, 1, 0, 8, 3)


@dataclass(frozen=True)
class Case:
    """A batch, with the policy's log-probs and entropies on it as leaves of a graph."""

    batch: LossBatch
    num_completion_S: np.ndarray
    log_probs_N: torch.Tensor
    entropy_N: torch.Tensor

    @property
    def mask_N(self) -> np.ndarray:
        return self.batch.loss_mask_N.numpy().astype(np.float64)

    @property
    def spans(self) -> list[range]:
        ends = np.cumsum(self.num_completion_S)
        return [range(end - num, end) for end, num in zip(ends, self.num_completion_S, strict=True)]


def random_case(
    config: LossConfig,
    *,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
    spread: float = 0.4,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Makes a batch with every field filled; `spread` is the standard deviation of the log-prob gap between any two policies, in nats."""
    generator = np.random.default_rng(seed)
    num_completion_S = np.array(lengths)
    num_tokens = int(num_completion_S.sum())
    log_probs_N = -generator.exponential(1.0, num_tokens)
    mask_N = (generator.random(num_tokens) < 0.8).astype(np.float64)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    batch = LossBatch(
        cu_seqlens_S=torch.tensor([0, *np.cumsum(num_completion_S)]),
        weights_N=tensor(token_weights(config, mask_N, num_completion_S)),
        loss_mask_N=tensor(mask_N),
        is_current_N=torch.tensor(np.repeat(generator.random(len(lengths)) < 0.5, lengths)),
        rollout_log_probs_N=tensor(log_probs_N + spread * generator.normal(size=num_tokens)),
        old_log_probs_N=tensor(log_probs_N + spread * generator.normal(size=num_tokens)),
        advantages_N=tensor(generator.normal(size=num_tokens)),
        ref_log_probs_N=tensor(log_probs_N + spread * generator.normal(size=num_tokens)),
        values_N=tensor(generator.normal(size=num_tokens)),
        returns_N=tensor(generator.normal(size=num_tokens)),
    )
    entropy_N = tensor(generator.random(num_tokens))
    return Case(batch, num_completion_S, tensor(log_probs_N).requires_grad_(), entropy_N.requires_grad_())


def token_weights(config: LossConfig, mask_N: np.ndarray, num_completion_S: np.ndarray) -> np.ndarray:
    total = aggregation.denominator(mask_N, num_completion_S, config=config)
    return aggregation.token_weights(mask_N, num_completion_S, config=config, denominator=total)


def part(case: Case, samples: range) -> Case:
    """Returns the samples of a case as a micro-batch, with their weights in the whole batch."""
    start, stop = (int(case.batch.cu_seqlens_S[index]) for index in (samples.start, samples.stop))
    cut = {
        field.name: tensor[start:stop]
        for field in fields(case.batch)
        if field.name != "cu_seqlens_S" and (tensor := getattr(case.batch, field.name)) is not None
    }
    batch = replace(case.batch, cu_seqlens_S=case.batch.cu_seqlens_S[samples.start : samples.stop + 1] - start, **cut)
    return Case(batch, case.num_completion_S[samples], case.log_probs_N[start:stop], case.entropy_N[start:stop])
