"""Statistics of paired measurements: an estimate of the difference and a confidence interval."""

import statistics
from collections.abc import Sequence
from itertools import combinations_with_replacement

CONFIDENCE = 0.95


def paired(differences: Sequence[float]) -> dict[str, float | None]:
    """The Hodges-Lehmann estimate of a median difference and its 95 % interval by Wilcoxon's signed ranks; quartiles and range.

    A few slow turns hardly move it. The interval is None for fewer than six pairs, which cannot give one.
    Source: Hollander and Wolfe, Nonparametric Statistical Methods, sec. 3.2 and 3.3.
    """
    averages = sorted((one + other) / 2 for one, other in combinations_with_replacement(differences, 2))
    outside = _num_outside(len(differences))
    low, high = (None, None) if outside is None else (averages[outside], averages[-1 - outside])
    return {"estimate": statistics.median(averages), "low": low, "high": high, **spread(differences)}


def spread(values: Sequence[float]) -> dict[str, float]:
    quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "quarter": quarters[0],
        "three_quarters": quarters[2],
        "least": min(values),
        "greatest": max(values),
    }


def _num_outside(num_pairs: int) -> int | None:
    """Number of averages outside each end of the interval; None if even all averages do not reach the confidence."""
    # ways[w]: number of subsets of the ranks 1..num_pairs with sum w.
    ways = [1]
    for rank in range(1, num_pairs + 1):
        longer = ways + [0] * rank
        ways = [count + (longer[total - rank] if total >= rank else 0) for total, count in enumerate(longer)]
    tail, outside = 0, None
    for total, count in enumerate(ways):
        tail += count
        if 2 * tail > (1 - CONFIDENCE) * 2**num_pairs:
            return outside
        outside = total
    return outside
