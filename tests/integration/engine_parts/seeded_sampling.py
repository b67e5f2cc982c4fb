"""Seeded sampling on a CPU."""

import torch

from tasuki.rollout.sglang.cpu.attention import multinomial_with_seed


def test_the_same_seed_and_position_draw_the_same_index_and_others_follow_the_distribution() -> None:
    log_probs = torch.tensor([0.1, 0.2, 0.7]).log().expand(20_000, 3)
    seeds = torch.arange(20_000)
    positions = torch.zeros(20_000, dtype=torch.int64)
    drawn = multinomial_with_seed(log_probs, seeds, positions)
    assert torch.equal(drawn, multinomial_with_seed(log_probs, seeds, positions))
    shares = torch.bincount(drawn.flatten(), minlength=3) / 20_000
    assert torch.allclose(shares, torch.tensor([0.1, 0.2, 0.7]), atol=0.02)


def test_an_index_without_probability_is_never_drawn() -> None:
    log_probs = torch.tensor([-torch.inf, 0.0, -torch.inf]).expand(1000, 3)
    drawn = multinomial_with_seed(log_probs, torch.arange(1000), torch.zeros(1000, dtype=torch.int64))
    assert set(drawn.flatten().tolist()) == {1}


def test_logits_that_are_nan_still_give_an_index_of_the_vocabulary() -> None:
    drawn = multinomial_with_seed(torch.full((4, 7), torch.nan), torch.arange(4), torch.zeros(4, dtype=torch.int64))
    assert int(drawn.max()) < 7
