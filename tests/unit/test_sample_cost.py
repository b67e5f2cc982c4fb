"""FLOPs of a sample by its length, from a model's shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tasuki.models.family import Attention, Model, full_attention
from tasuki.models.shape import ModelShape
from tasuki.trainer.data.cost import sample_cost

DENSE = ModelShape(
    architecture="Qwen2ForCausalLM", hidden_size=8, intermediate_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=2,
    vocab_size=32, context_length=64, has_qkv_bias=True,
)  # fmt: skip
ATTENTION = 8 * 8 + 2 * 8 * 4 + 8 * 8
"""Counts the weights of queries, keys, values and output."""
MLP = 3 * 8 * 16


def model(shape: ModelShape, *windows: int | None) -> Model:
    attention = full_attention(shape)
    return Model(shape=shape, attention=Attention(query_scale=1.0, windows=windows) if windows else attention)


def test_a_token_costs_six_flops_for_each_weight_that_it_is_multiplied_with() -> None:
    cost = sample_cost(model(DENSE))
    assert cost.linear == 6 * 3 * (ATTENTION + MLP)
    assert cost.quadratic == 7 * 3 * 8
    assert cost.flops(np.array([0, 5])).tolist() == [0, 5 * (cost.linear + cost.head) + 25 * cost.quadratic]
    tied = sample_cost(model(replace(DENSE, is_tied=True)))
    assert tied == cost


def test_under_adapters_weights_have_no_gradient() -> None:
    cost, frozen = sample_cost(model(DENSE)), sample_cost(model(DENSE), is_frozen=True)
    assert (frozen.linear, frozen.head, frozen.quadratic) == (cost.linear * 4 / 6, cost.head * 4 / 6, cost.quadratic)


def test_only_tokens_of_a_completion_reach_the_head() -> None:
    cost = sample_cost(model(DENSE))
    assert cost.head == 6 * 32 * 8
    all_of_it, few, none = cost.flops(np.array([9, 9, 9]), completions_S=np.array([9, 2, 0]))
    assert (all_of_it - few, few - none) == (7 * cost.head, 2 * cost.head)
    assert all_of_it == cost.flops(np.array([9]))[0]


def test_a_critic_has_one_output() -> None:
    cost = sample_cost(model(replace(DENSE, is_critic=True)))
    assert (cost.linear, cost.head) == (6 * 3 * (ATTENTION + MLP), 6 * 8)


def test_a_token_costs_as_many_experts_as_are_chosen_for_it() -> None:
    sparse = replace(DENSE, num_experts=10, experts_per_token=2, expert_size=4, dense_layers=frozenset({1}))
    experts, router = 2 * 3 * 8 * 4, 10 * 8
    assert sample_cost(model(sparse)).linear == 6 * (3 * ATTENTION + MLP + 2 * (experts + router))


@pytest.mark.parametrize("length", [1, 99, 100, 101, 5000])
def test_a_layer_with_a_window_costs_the_pairs_within_it(length: int) -> None:
    cost = sample_cost(model(DENSE, 100, None, 100))
    pairs = sum(min(place, 100) for place in range(1, length + 1)) * 2 + length * (length + 1) // 2
    # Twice the pairs, minus one per token and layer, is the square of a length.
    flops = cost.flops(np.array([length]), completions_S=np.array([0]))[0]
    assert flops == pytest.approx(length * cost.linear + 7 * 8 * (2 * pairs - 3 * length), rel=0.02)
