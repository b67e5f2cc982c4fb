"""Experts spread over two ranks against experts gathered on each: steps, checkpoints, published and exported weights.

Steps against plain torch are in test_trainer_exactness.
"""

import json
from typing import Any

import pytest

from tests.extent import crossed
from tests.integration.launched import run_ranks
from tests.integration.plain_critic import add_head
from tests.models import make_model, save_checkpoint

NUM_EXPERTS = {"qwen3_moe": "num_experts", "mixtral": "num_local_experts"}
CASES = crossed(NUM_EXPERTS, ("none", "full"))
NUM_LAYERS = 2
EXPERT_ELEMENTS = {"qwen3_moe": 4 * 3 * 32 * 64, "mixtral": 4 * 3 * 96 * 64}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Facts by family and checkpointing, from one launch."""
    folder, output = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("facts")
    for kind, key in NUM_EXPERTS.items():
        add_head(save_checkpoint(make_model(kind, seed=3, **{key: 4}), folder / kind))
    run_ranks("expert_ranks.py", output, *(f"{folder / kind}:{rung}" for kind, rung in CASES), num_ranks=2)
    return {(kind, rung): json.loads((output / f"{kind}-{rung}.json").read_text()) for kind, rung in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_of_gathered_experts(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    found = facts[case]["steps"]
    for gathered, spread in found["steps"]:
        assert spread == pytest.approx(gathered, rel=1e-4, abs=1e-5)
    assert max(found["parameters"]) < 1e-5
    assert found["tags"][0] == found["tags"][1] and found["tags"][1]["weights"] > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_checkpoint_goes_on_either_way(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    assert facts[case]["steps"]["crossed"] == [0.0, 0.0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_published_and_exported_is_the_same(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    assert facts[case]["steps"]["loaded"] == [True, True]
    assert facts[case]["steps"]["exported"] is True


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_travel_and_experts_do_not(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    kind, rung = case
    collectives = facts[case]["collectives"]
    (no_exchanges, num_gathered), (num_exchanges, num_other) = collectives["gathered"], collectives["spread"]
    # Row counts, rows to the experts and back, each again where the layer is recomputed; gradients both ways.
    assert (no_exchanges, num_exchanges) == (0, NUM_LAYERS * (8 if rung == "full" else 5))
    # in forward and in backward
    assert num_gathered - num_other == 2 * NUM_LAYERS * EXPERT_ELEMENTS[kind]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_and_adapters_beside_spread_experts(facts: dict[Any, Any], case: tuple[str, str]) -> None:
    assert facts[case]["bfloat16"] < 0.02
    assert facts[case]["lora"] < 1e-4
