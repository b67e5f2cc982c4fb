"""What `trainer.backend = "megatron"` refuses, and what the planner counts for it."""

import math
from typing import Any

import pytest

from tasuki.cli.plan import headline
from tasuki.config.checks import check_model
from tasuki.config.load import config_of
from tasuki.config.schema import NodeConfig
from tasuki.models.known import read_model
from tasuki.models.shape import EXPERTS
from tasuki.node.start import start_node
from tasuki.planner.node import Checkpointing, Part
from tasuki.planner.presets import MODELS
from tasuki.planner.trainer_bytes import checkpoint_bytes, gradient_bytes, trainer_tags
from tasuki.trainer.backends import megatron
from tasuki.trainer.durable.checkpoint import checkpoint_facts
from tasuki.trainer.wire import Role
from tasuki.wire.errors import InvalidArgument
from tests.models import CONFIGS
from tests.planned import node_with
from tests.refusal import refusing

DENSE, SPARSE = MODELS["qwen2.5-7b"], MODELS["qwen3-30b-a3b"]


def config(*, fleet: dict[str, Any] | None = None, **trainer: Any) -> NodeConfig:
    trainer = {"backend": "megatron", **trainer}
    return NodeConfig.model_validate({"state_dir": "/s", "model": {"path": "/m"}, "trainer": trainer, "fleet": fleet})


@pytest.mark.parametrize(
    "trainer",
    [
        {"sequence_parallel": 2, "num_ranks": 2},
        {"expert_parallel": True, "num_ranks": 2},
        {"critic": {}},
        {"lora.tower": True},
        {"lora.type": "vlm_lora"},
        {"lora.init": "pissa"},
        {"lora.type": "lora", "backend": "fsdp"},
        {"lora.type": "dora", "backend": "fsdp"},
        {"lora.dropout_position": "post", "backend": "fsdp"},
        {"lora.target_modules": ["linear_qkv"], "backend": "fsdp"},
        {"lora.exclude_modules": ["0.mlp.linear_fc1"], "backend": "fsdp"},
        {"mlp_tile_tokens": 64},
        {"compile": "blocks"},
        {"moments": "8bit"},
        {"reference_on_host": True},
        {"checkpointing": "offloaded"},
        {"router_bias_update_rate": 0.1},
        {"megatron": {"tensor_parallel": 2}, "num_ranks": 3},
        {"megatron": {"expert_parallel": 4}, "num_ranks": 2},
        {"megatron": {"tensor_parallel": 2}, "num_ranks": 2, "backend": "fsdp"},
    ],
)
def test_a_setting_of_the_other_backend_is_refused_by_name(trainer: dict[str, Any]) -> None:
    key, value = next(iter(trainer.items()))
    if key.startswith("lora."):
        trainer = {**trainer, "lora": {key.removeprefix("lora."): value}}
        del trainer[key]
    with pytest.raises(ValueError, match=rf"trainer\.{key}"):
        config(**trainer)


@pytest.mark.parametrize(
    ("field", "lora"),
    [
        ("target_modules", {"type": "lora", "target_modules": ["q_proj", "v_proj"]}),
        ("target_modules", {"type": "dora", "exclude_modules": ["1.mlp.up_proj"]}),
        ("target_modules", {"use_dora": True, "target_modules": ["gate_proj"]}),
        ("rank_pattern", {"type": "lora", "rank_pattern": {"k_proj": 4}}),
        ("alpha_pattern", {"type": "lora", "alpha_pattern": {"up_proj": 4}}),
    ],
)
def test_layers_that_are_computed_as_one_have_alike_adapters(field: str, lora: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_model(config(lora=lora), DENSE)
    assert refused.value.metadata["field"] == f"trainer.lora.{field}"


@pytest.mark.parametrize(("kind", "num_a"), [("canonical_lora", 7), ("lora", 4), ("dora", 4)])
def test_ranks_hold_all_of_one_factor_of_each_adapter(kind: str, num_a: int) -> None:
    trainer = {"backend": "megatron", "megatron": {"tensor_parallel": 2}, "lora": {"rank": 8, "type": kind}}
    node = node_with(DENSE, num_ranks=4, checkpointing=Checkpointing.FULL, trainer=trainer)
    assert trainer_tags(node)[Part.TRAINER_WEIGHTS] == pytest.approx(DENSE.num_parameters, rel=0.1)  # half of bfloat16
    hidden, inner, kv = DENSE.hidden_size, DENSE.intermediate_size, DENSE.kv_size
    whole = (num_a - 2) * hidden + 2 * hidden  # A of column-parallel layers, B of both others
    split = hidden + 2 * kv + 2 * inner + hidden + inner
    magnitudes = 2 * hidden + (hidden + 2 * kv + 2 * inner) / 2 if kind == "dora" else 0
    # Two ranks step half of what each has.
    assert gradient_bytes(node) == 2 * DENSE.num_layers * (8 * (whole + split / 2) + magnitudes)


@pytest.mark.parametrize(
    ("kind", "layout", "field"),
    [
        ("llama", {"tensor_parallel": 2}, "trainer.megatron.tensor_parallel"),  # 131 tokens of the vocabulary
        ("qwen3", {"tensor_parallel": 4}, "trainer.megatron.tensor_parallel"),  # two key heads
        ("qwen3", {"expert_parallel": 2}, "trainer.megatron.expert_parallel"),
        ("qwen3_moe", {"expert_parallel": 2}, "trainer.megatron.expert_parallel"),  # five experts
        ("qwen3_moe", {"expert_parallel": 8}, "trainer.megatron.expert_parallel"),
        ("gemma2", {}, "trainer.backend"),
        ("mixtral", {}, "trainer.backend"),
    ],
)
def test_a_model_that_it_cannot_hold_is_refused(kind: str, layout: dict[str, int], field: str) -> None:
    shape = CONFIGS[kind]().to_dict()
    shape["architectures"] = {
        "llama": ["LlamaForCausalLM"], "qwen3": ["Qwen3ForCausalLM"], "gemma2": ["Gemma2ForCausalLM"],
        "qwen3_moe": ["Qwen3MoeForCausalLM"], "mixtral": ["MixtralForCausalLM"],
    }[kind]  # fmt: skip
    with refusing(field):
        check_model(config(num_ranks=8, megatron=layout), read_model(shape).shape)


@pytest.mark.parametrize("key", ["pipeline_parallel", "context_parallel"])
def test_other_parallelism_is_refused_with_the_way_round(key: str) -> None:
    table = {"state_dir": "/s", "model": {"path": "/m"}, "trainer": {"backend": "megatron", "megatron": {key: 2}}}
    with pytest.raises(InvalidArgument, match=r"trainer\.megatron\.tensor_parallel") as refused:
        config_of(table)
    assert refused.value.metadata["field"] == f"trainer.megatron.{key}"


@pytest.mark.parametrize("version", [None, "0.15.0"])
def test_a_node_with_another_megatron_core_does_not_start(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(_: str) -> str:
        if version is None:
            raise megatron.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(megatron.metadata, "version", found)
    config = config_of({"state_dir": "/s", "model": {"path": "/m"}, "trainer": {"backend": "megatron"}})
    with pytest.raises(InvalidArgument, match=megatron.VERSION):
        start_node(config)


def test_the_headline_names_the_backend() -> None:
    trainer = {"backend": "megatron", "megatron": {"tensor_parallel": 2}}
    node = node_with(DENSE, num_ranks=4, checkpointing=Checkpointing.FULL, trainer=trainer)
    assert "4 Megatron TP 2 ranks" in headline(node)


def test_a_checkpoint_names_excluded_layers_as_every_backend_does() -> None:
    model = CONFIGS["qwen3"]()
    model.architectures = ["Qwen3ForCausalLM"]
    facts = [
        checkpoint_facts({Role.POLICY: model}, progress=None, config=trainer, num_ranks=1)
        for words in (["0.mlp.linear_fc1"], ["0.mlp.gate_proj", "0.mlp.up_proj"])
        for trainer in [config(lora={"exclude_modules": words}).trainer]
    ]
    assert facts[0] == facts[1] and facts[0].roles[Role.POLICY].lora_more


def test_ranks_hold_their_part_of_the_layers_and_step_their_rows_of_it() -> None:
    trainer = {"backend": "megatron", "megatron": {"tensor_parallel": 2}}
    node = node_with(DENSE, num_ranks=4, checkpointing=Checkpointing.FULL, trainer=trainer)
    tags, half = trainer_tags(node), DENSE.num_parameters / 2
    # bfloat16 parts of the layers, and float32 rows of them that two ranks share; norms, which all have, are small.
    assert gradient_bytes(node) == pytest.approx(half * 4 / 2, rel=1e-3)
    assert checkpoint_bytes(node) == pytest.approx(DENSE.num_parameters * 12, rel=1e-3)
    # With what arenas round.
    assert tags[Part.GRADIENTS] == pytest.approx(half * 4, rel=0.1)
    assert tags[Part.TRAINER_WEIGHTS] == pytest.approx(half * (2 + 4 / 2), rel=0.1)
    assert tags[Part.OPTIMIZER] == pytest.approx(half * 8 / 2, rel=0.1)


def test_experts_of_a_rank_are_counted_once() -> None:
    trainer = {"backend": "megatron", "megatron": {"tensor_parallel": 2, "expert_parallel": 4}}
    node = node_with(SPARSE, num_ranks=8, checkpointing=Checkpointing.FULL, trainer=trainer)
    shapes = SPARSE.parameters().items()
    experts = sum(math.prod(shape) for name, shape in shapes if name.endswith(EXPERTS))
    # Norms and routers, which all ranks have, are small.
    held = (SPARSE.num_parameters - experts) / 2 + experts / 4
    assert trainer_tags(node)[Part.GRADIENTS] == pytest.approx(held * 4, rel=0.1)  # with what arenas round
    assert gradient_bytes(node) == pytest.approx(SPARSE.num_parameters / 8 * 4, rel=1e-2)
    assert checkpoint_bytes(node) == pytest.approx(SPARSE.num_parameters * 12, rel=1e-2)
    assert node.rows_per_token == 4 * SPARSE.experts_per_token
