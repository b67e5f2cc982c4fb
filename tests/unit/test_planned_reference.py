"""Memory that the planner counts for a KL reference: none unless it is used, else on the GPU or the host as configured."""

from typing import Any

import pytest
from pydantic import ValidationError

from tasuki.config.schema import NodeConfig
from tasuki.planner.node import GB, Node, Part
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS
from tasuki.wire.stages import Phase
from tests.planned import chosen_node

MODEL = MODELS["qwen2.5-7b"]
KL = {"dataset": "d.jsonl", "output_dir": "o", "reward": {"function": "r.py:r"}, "loss": {"kl_coef": 0.1}}
ADAPTERS = {"lora": {"rank": 8}}


def layout(*, train: dict[str, Any] | None = None, gpu_bytes: int = 141 * GB, **trainer: Any) -> Node:
    config = NodeConfig.model_validate(
        {"state_dir": "s", "model": {"path": "m"}, "device": "cuda", "train": train}
        | {"trainer": {"micro_batch_tokens": 2048, "num_ranks": 2, **trainer}, "rollout": {"kv_ratio": 0.3, "tp_size": 2}}
    )
    return chosen_node(config, MODEL, gpu_bytes=gpu_bytes, host_bytes=500 * GB)


def weights(one: Node) -> tuple[int, int]:
    """Bytes of the trainer's weights in a step, on the first GPU and on the host."""
    training = plan(one).stage(Phase.TRAIN)
    return training.gpus[0][Part.TRAINER_WEIGHTS], training.host.get(Part.TRAINER_WEIGHTS, 0)


@pytest.mark.parametrize(
    ("settings", "has_reference", "on_host"),
    [
        ({}, False, False),
        ({"train": KL}, True, False),
        ({"train": KL, "reference_on_host": True}, True, True),
        ({"reference_on_host": False}, True, False),
        ({"reference_on_host": True}, True, True),
        ({"train": KL, **ADAPTERS}, False, False),
    ],
    ids=str,
)
def test_a_reference_is_planned_where_a_key_says_that_it_is_used(settings: dict[str, Any], has_reference: bool, on_host: bool):
    found = layout(**settings)
    assert (found.has_reference, found.has_reference and found.config.reference_is_on_host) == (has_reference, on_host)


def test_its_bytes_are_on_the_gpu_or_on_the_host() -> None:
    none, on_gpu, on_host = (layout(**settings) for settings in ({}, {"reference_on_host": False}, {"reference_on_host": True}))
    shard = MODEL.num_parameters  # two bytes each, over two ranks
    assert weights(on_gpu)[0] - weights(none)[0] == pytest.approx(shard, abs=2**30), "in chunks of up to 1 GiB"
    assert weights(on_host)[0] == weights(none)[0]
    assert weights(on_host)[1] - weights(none)[1] == pytest.approx(2 * shard, rel=0.02)


