"""What `trainer.backend = "megatron"` refuses, and what the planner counts for it."""

from typing import Any

import pytest

from tasuki.config.checks import check_model
from tasuki.config.schema import NodeConfig
from tasuki.models.known import read_model
from tasuki.planner.node import Checkpointing, Part
from tasuki.planner.presets import MODELS
from tasuki.planner.trainer_bytes import checkpoint_bytes, gradient_bytes, trainer_tags
from tasuki.trainer.backends import megatron
from tasuki.wire.errors import InvalidArgument
from tests.models import CONFIGS
from tests.planned import node_with
from tests.refusal import refusing

DENSE = MODELS["qwen2.5-7b"]


def config(*, fleet: dict[str, Any] | None = None, **trainer: Any) -> NodeConfig:
    trainer = {"backend": "megatron", **trainer}
    return NodeConfig.model_validate({"state_dir": "/s", "model": {"path": "/m"}, "trainer": trainer, "fleet": fleet})


@pytest.mark.parametrize(
    "trainer",
    [
        {"sequence_parallel": 2, "num_ranks": 2},
        {"expert_parallel": True, "num_ranks": 2},
        {"critic": {}},
        {"lora": {}},
        {"mlp_tile_tokens": 64},
        {"compile": "blocks"},
        {"moments": "8bit"},
        {"moments": "host"},
        {"reference_on_host": True},
        {"prefix_sharing": True},
        {"checkpointing": "offloaded"},
        {"router_aux_loss_coef": 0.1},
        {"megatron": {"tensor_parallel": 2}, "num_ranks": 3},
        {"megatron": {"tensor_parallel": 2}, "num_ranks": 2, "backend": "fsdp"},
    ],
)
def test_a_setting_of_the_other_backend_is_refused_by_name(trainer: dict[str, Any]) -> None:
    key = next(iter(trainer))
    with pytest.raises(ValueError, match=rf"trainer\.{key}"):
        config(**trainer)


@pytest.mark.parametrize(
    ("kind", "size", "field"),
    [
        ("llama", 2, "trainer.megatron.tensor_parallel"),  # 131 tokens of the vocabulary
        ("qwen3", 4, "trainer.megatron.tensor_parallel"),  # two key heads
        ("gemma2", 1, "trainer.backend"),
        ("qwen3_moe", 1, "trainer.backend"),
    ],
)
def test_a_model_that_it_cannot_hold_is_refused(kind: str, size: int, field: str) -> None:
    shape = CONFIGS[kind]().to_dict()
    shape["architectures"] = {
        "llama": ["LlamaForCausalLM"], "qwen3": ["Qwen3ForCausalLM"], "gemma2": ["Gemma2ForCausalLM"], "qwen3_moe": ["Qwen3MoeForCausalLM"]
    }[kind]  # fmt: skip
    with refusing(field):
        check_model(config(num_ranks=size, megatron={"tensor_parallel": size}), read_model(shape).shape)


@pytest.mark.parametrize("version", [None, "0.15.0"])
def test_another_megatron_core_is_refused(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(_: str) -> str:
        if version is None:
            raise megatron.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(megatron.metadata, "version", found)
    with pytest.raises(InvalidArgument, match=megatron.VERSION):
        megatron.check_installed()


def test_ranks_hold_their_part_of_the_layers_and_step_their_rows_of_it() -> None:
    trainer = {"backend": "megatron", "megatron": {"tensor_parallel": 2}}
    node = node_with(DENSE, num_ranks=4, checkpointing=Checkpointing.FULL, trainer=trainer)
    tags, half = trainer_tags(node), DENSE.num_parameters / 2
    # bfloat16 parts of the layers, and float32 rows of them that two ranks share; norms, which all have, are small.
    assert gradient_bytes(node) == pytest.approx(half * 4, rel=1e-3)
    assert checkpoint_bytes(node) == pytest.approx(DENSE.num_parameters * 12, rel=1e-3)
    # With what arenas round.
    assert tags[Part.TRAINER_WEIGHTS] == pytest.approx(half * (2 + 4 / 2), rel=0.1)
    assert tags[Part.OPTIMIZER] == pytest.approx(half * 8 / 2, rel=0.1)
