"""Which samples share a micro-batch on which rank, as a pure function."""

from __future__ import annotations

from collections.abc import Sequence

MicroBatchPlan = list[list[list[int]]]
"""[rank][micro-batch] -> positions of samples in the call. Every rank has as many micro-batches; the last of them may be empty."""


def plan_micro_batches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> MicroBatchPlan:
    """Balanced over ranks by tokens, few micro-batches, none above `max_tokens` padded tokens.

    lengths: tokens of each sample, none above `max_tokens`. Samples of like length share a micro-batch, which keeps padding small.
    """
    descending = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    # Dealt in snake order (0 1 2 2 1 0 0 1 ...): every rank gets as many samples and nearly as many tokens.
    snake = [*range(num_ranks), *reversed(range(num_ranks))]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for turn, index in enumerate(descending):
        dealt[snake[turn % len(snake)]].append(index)
    plan = [_cut(indices, lengths=lengths, max_tokens=max_tokens) for indices in dealt]
    num_micro_batches = max(len(micro_batches) for micro_batches in plan)
    return [micro_batches + [[] for _ in range(num_micro_batches - len(micro_batches))] for micro_batches in plan]


def _cut(indices: list[int], *, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cuts samples, longest first, into runs of at most `max_tokens` padded tokens."""
    micro_batches: list[list[int]] = []
    start = 0
    while start < len(indices):
        longest = lengths[indices[start]]
        assert longest <= max_tokens, "check_sequences refuses such a sample"
        end = start + max_tokens // longest
        micro_batches.append(indices[start:end])
        start = end
    return micro_batches
