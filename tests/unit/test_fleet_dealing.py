"""Prompts dealt to the nodes of a fleet."""

from __future__ import annotations

import random

from tasuki.fleet.dealing import deal_families, deal_prompts, prompt_families


def test_prompts_that_continue_one_another_stay_on_one_node() -> None:
    turns = [[1, 2], [5, 6], [1, 2, 3], [5, 6, 7], [1, 2, 3, 4], [9]]
    assert prompt_families(turns) == [[0, 2, 4], [1, 3], [5]]
    assert deal_prompts(turns, num_samples=1, loads=[0, 0]) == [
        [range(1), range(2, 3), range(4, 5)],
        [range(1, 2), range(3, 4), range(5, 6)],
    ]


def test_a_common_beginning_alone_joins_no_prompts() -> None:
    assert prompt_families([[1, 2, 3], [1, 2, 4]]) == [[0], [1]]


def test_every_family_is_dealt_once_and_loads_differ_by_a_family_at_most() -> None:
    chosen = random.Random(0)
    for _ in range(300):
        sizes = [chosen.randint(1, 9) for _ in range(chosen.randint(1, 40))]
        loads = [chosen.choice([0, 0, 3, 20]) for _ in range(chosen.randint(1, 6))]
        shares = deal_families(sizes, loads=loads)
        assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
        after = [load + sum(sizes[index] for index in share) for load, share in zip(loads, shares, strict=True)]
        busy = [total for total, share in zip(after, shares, strict=True) if share]
        assert max(busy) - min(after) <= 2 * max(sizes)
