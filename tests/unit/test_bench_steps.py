"""Early tokens in the benchmark of whole steps."""

from __future__ import annotations

from tests.bench.steps_gpu import EARLY_S, early_tokens


def test_tokens_of_the_first_seconds_count_from_the_first_token() -> None:
    ends_s = [0.5, 0.5 + EARLY_S / 2, 0.5 + EARLY_S, 9.0]
    assert early_tokens([1, 8, 16, 32], ends_s) == 16.0
    assert early_tokens([1, 8, 16, 32], [0.5, 0.5 + EARLY_S / 2, 0.5 + 2 * EARLY_S, 9.0]) == 10.7


def test_a_shorter_probe_that_is_answered_late_counts_as_the_longer_one() -> None:
    assert early_tokens([1, 8, 16], [0.5, 0.5 + EARLY_S, 0.4 + EARLY_S]) == 16.0


def test_all_tokens_that_came_sooner_are_early() -> None:
    assert early_tokens([1, 8, 16], [0.1, 0.2, 0.3]) == 16.0
