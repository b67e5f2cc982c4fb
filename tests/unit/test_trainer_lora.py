"""Modules that can have adapters, their initial values, and refusals of checkpoints."""

from contextlib import nullcontext
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma4Config, Gemma4ForConditionalGeneration

from tasuki.config.checks import check_model
from tasuki.config.lora_checks import check_lora_targets
from tasuki.config.schema import FleetConfig, NodeConfig
from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.known import read_model
from tasuki.models.shape import ModelShape
from tasuki.planner.kept_bytes import width
from tasuki.planner.node import GB, node_of
from tasuki.planner.trainer_bytes import trained_shards
from tasuki.trainer.backends.fsdp.lora import merged_weights
from tasuki.trainer.backends.fsdp.lora.adapters import add_adapters, base_parameters, trained_parameters
from tasuki.trainer.backends.fsdp.lora.merged_weights import _grouped
from tasuki.trainer.durable.checkpoint import CheckpointFacts, RoleFacts, load_checkpoint
from tasuki.trainer.modules import lora as adapters
from tasuki.trainer.modules.experts import GroupedExperts, replace_experts
from tasuki.trainer.modules.lora import Dropout, draw_seed, from_file, merge_experts, peft_config, set_dropout, write_adapter
from tasuki.trainer.wire import Role
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.sealed_json import sealed
from tests.models import CONFIGS, make_model
from tests.planned import config_of
from tests.refusal import refusing
from tests.saved_tensors import kept_bytes


def shape_of(model: torch.nn.Module) -> ModelShape:
    return read_model(model.config.to_dict() | {"architectures": [type(model).__name__]}).shape


def on_meta(kind: str) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen2_tied", "qwen3"])
def test_adapters_alone_are_trained_and_every_weight_keeps_its_name(kind: str) -> None:
    model = on_meta(kind)
    names = [name for name, _ in model.named_parameters()]
    add_adapters(model, LoraConfig(rank=4))
    assert [name for name, _ in base_parameters(model)] == names
    trained = dict(trained_parameters(model))
    assert len(trained) == 2 * 2 * 7
    assert all(".lora_" in name and param.dtype == torch.float32 and 4 in param.shape for name, param in trained.items())


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_experts_are_merged_a_few_at_a_time_and_rounded_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    base, a, b = torch.randn(7, 12, 8).bfloat16(), torch.randn(7, 3, 8), torch.randn(7, 12, 3)
    monkeypatch.setattr(adapters, "_CPU_PIECE_BYTES", at_once * base[0].numel() * 4)
    # From the middle of an expert on, by gate and up as in a checkpoint.
    held = torch.full((6, 2, 6, 8), torch.nan, dtype=torch.bfloat16)
    with Largest() as largest:
        merge_experts([*held.flatten(0, 1)], base, a, b, scaling=2.0, first_row=6)
    wanted = (base.double() + 2 * b.double() @ a.double()).bfloat16().flatten(0, 1)[6:-6]
    assert torch.equal(held.flatten(0, 2), wanted)
    assert largest.num_bytes <= at_once * base[0].numel() * 4
    # Whole, as the checkpoints of Qwen3.5 have them.
    whole = torch.full((7, 12, 8), torch.nan, dtype=torch.bfloat16)
    merge_experts([whole], base, a, b, scaling=2.0)
    assert torch.equal(whole.flatten(0, 1)[6:-6], wanted) and not whole.isnan().any()


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_linear_layers_of_experts_are_no_targets_but_their_attentions_are(kind: str) -> None:
    model = on_meta(kind)
    with pytest.raises(InvalidArgument, match="no linear gate_proj, up_proj, down_proj; .* trainer.lora.experts"):
        check_lora_targets(shape_of(model), LoraConfig().target_modules)
    check_lora_targets(shape_of(model), ("q_proj", "o_proj"))
    add_adapters(model, LoraConfig(target_modules=("q_proj", "o_proj")))
    assert len(dict(trained_parameters(model))) == 2 * 2 * 2


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_adapters_of_experts_are_trained_in_float32_and_planned(kind: str) -> None:
    model, lora = on_meta(kind), LoraConfig(rank=8, target_modules=("q_proj",), experts=True)
    shape, names = shape_of(model), [name for name, _ in model.named_parameters()]
    with torch.device("meta"):
        replace_experts(model, None)
        add_adapters(model, lora)
    assert [name for name, _ in base_parameters(model)] == names
    trained = dict(trained_parameters(model))
    assert all("_lora_" in name or ".lora_" in name for name in trained)
    assert {param.dtype for param in trained.values()} == {torch.float32}
    config = config_of(trainer={"lora": lora.model_dump()})
    planned = trained_shards(node_of(config, shape, gpu_bytes=GB, host_bytes=GB))
    assert sorted(planned) == sorted(tuple(param.shape) for param in trained.values())


def test_patterns_that_match_nothing_too_leave_the_scaling_of_experts_alone() -> None:
    given: dict[str, Any] = {"rank_pattern": {"|q_proj": 2}, "alpha_pattern": {"(q_proj)?": 5.0}}
    model = on_meta("qwen3_moe")
    with torch.device("meta"):
        replace_experts(model, None)
        add_adapters(model, LoraConfig(rank=8, alpha=16, target_modules=("q_proj",), experts=True, **given))
    assert {module.scaling for module in model.modules() if isinstance(module, GroupedExperts)} == {2.0}


def test_peft_adapts_the_text_of_a_gemma_4_alone_beside_its_towers() -> None:
    config = Gemma4Config(text_config=CONFIGS["gemma4"]().to_dict(), vision_config={}, audio_config={})
    with torch.device("meta"):
        model = inject_adapter_in_model(peft_config(LoraConfig(), has_tower=True), Gemma4ForConditionalGeneration(config))
    adapted = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    assert adapted and all(".language_model." in name for name in adapted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exclude_modules": ["k_proj"]}, "exclude_modules: k_proj is no layer of target_modules"),
        ({"exclude_modules": ["proj"]}, "exclude_modules: proj is no layer of target_modules"),
        ({"exclude_modules": ["q_proj", "o_proj"]}, "exclude_modules: leaves no layer"),
        ({"rank_pattern": {"proj": 2}}, "rank_pattern: proj matches no layer with an adapter"),
        ({"alpha_pattern": {"1.o_proj": 2.0}}, "alpha_pattern: 1.o_proj matches no layer"),
        ({"exclude_modules": ["q_proj"], "alpha_pattern": {"q_proj": 2.0}}, "alpha_pattern: q_proj matches no layer"),
        ({"rank_pattern": {"(q": 2}}, "is no regular expression"),
        ({"rank_pattern": {"q_proj{99999999999}": 2}}, "is no regular expression"),
        ({"alpha_pattern": {"(?i)Q_PROJ": 2.0}}, "is no regular expression: global flags"),
        ({"init": "gaussian", "path": "x"}, "init"),
        ({"use_dora": True, "experts": True}, "use_dora is not for experts"),
        ({"dropout": 0.1, "experts": True}, "dropout is not for experts"),
        ({"init": "pissa", "path": "x"}, 'init = "pissa" has no effect with path'),
        ({"init": "pissa", "experts": True}, 'init = "pissa" is not for experts'),
        ({"init": "pissa", "use_dora": True, "dropout": 0.1}, 'dropout is not for init = "pissa" with use_dora'),
        (
            {"init": "pissa", "rank_pattern": {"1.*.q_proj": 65}},
            "rank: is above the 64 components of model.layers.1",
        ),
        ({"init": "pissa_niter_"}, "init"),
        ({"init": "olora"}, "init"),
    ],
)
def test_names_and_patterns_without_effect_are_refused_by_key(changes: dict[str, object], words: str) -> None:
    with pytest.raises((InvalidArgument, ValueError), match=words):
        config = config_of(trainer={"lora": {"target_modules": ["q_proj", "o_proj"], **changes}})
        check_model(config, shape_of(on_meta("llama")))


@pytest.mark.parametrize("key", ["exclude_modules", "rank_pattern", "alpha_pattern"])
def test_names_that_the_file_of_a_vision_models_adapter_has_otherwise_are_refused(key: str) -> None:
    def check(name: str) -> None:
        given = [name] if key == "exclude_modules" else {name: 2}
        config = config_of(trainer={"lora": {"target_modules": ["q_proj"], key: given}})
        check_model(config, shape_of(make_model("qwen3_vl", seed=0)))

    check("layers.0.self_attn.q_proj")
    with refusing(f"trainer.lora.{key}", match=r"model\.language_model\.layers\.0.* leave out its beginning"):
        check("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_layers_ranks_and_scalings_of_patterns_are_pefts_and_planned(init: Any) -> None:
    """PiSSA's first values double the ranks of what is trained, served and exported."""
    given: dict[str, Any] = {
        "exclude_modules": ("1.mlp.up_proj", "k_proj", "model.layers.0.self_attn.v_proj"),
        "rank_pattern": {"model.layers.0.mlp.(up|gate)_proj": 6, "self_attn.[qo]_proj": 3, "q_proj": 9},
        "alpha_pattern": {r"layers\.1\..*_proj": 10.0, "down_proj": 3.5},
    }
    copies, model = 1 + (init == "pissa"), on_meta("llama")
    lora = LoraConfig(rank=4, alpha=8, use_rslora=True, use_dora=True, init=init, **given)
    shape, peft = (
        shape_of(model),
        PeftConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=list(lora.target_modules), **given),
    )
    theirs = inject_adapter_in_model(peft, on_meta("llama"))
    expected = {
        name: (copies * module.r["default"], module.scaling["default"])
        for name, module in theirs.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert {name: (lora.rank_of(name), lora.scaling_of(name)) for name in lora.layers(shape)} == expected
    assert len(expected) == 2 * 7 - 4 and lora.max_rank == 9 * copies
    add_adapters(model, lora)
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            assert (module.r["default"], module.scaling["default"]) == (expected[name][0], pytest.approx(expected[name][1]))
    planned = trained_shards(node_of(config_of(trainer={"lora": lora.model_dump()}), shape, gpu_bytes=GB, host_bytes=GB))
    assert sorted(planned) == sorted(tuple(param.shape) for _, param in trained_parameters(model))


def test_patterns_of_a_written_adapter_keep_their_order_of_which_peft_takes_the_first(tmp_path: Path) -> None:
    patterns: dict[str, Any] = {
        "rank_pattern": {"v_proj": 3, "[kv]_proj": 5},
        "alpha_pattern": {"v_proj": 9.0, "[kv]_proj": 2.0},
    }
    lora = LoraConfig(rank=4, target_modules=("k_proj", "v_proj"), **patterns)
    write_adapter(tmp_path / "adapter", {"unread": torch.zeros(1)}, config=lora, source=tmp_path)
    written = PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    layers = inject_adapter_in_model(written, on_meta("llama")).named_modules()
    found = {name: module.scaling["default"] for name, module in layers if isinstance(module, LoraLayer)}
    assert found == {name: lora.scaling_of(name) for name in lora.layers(shape_of(on_meta("llama")))}
    assert set(found.values()) == {9 / 3, 2 / 5}


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_an_adapter_with_a_number_that_is_not_finite_is_refused_by_name(value: float) -> None:
    with refusing("trainer.lora.path", match=r"layers\.1\.q_proj\.lora_A\.weight holds a number that is not finite"):
        from_file("layers.1.q_proj.lora_A.default.weight", torch.tensor([[1.0, value]]), (1, 2))


def test_dora_is_served_merged() -> None:
    with pytest.raises(ValueError, match=r'rollout.lora = "adapter" cannot serve DoRA \(trainer.lora.use_dora\)'):
        config_of(trainer={"lora": {"use_dora": True}}, rollout={"lora": "adapter"})


def kept_per_token(lora: LoraConfig) -> int:
    """Bytes that autograd keeps of a token with adapters in a model of float32."""
    model, sizes = make_model("llama", seed=0), list[int]()
    add_adapters(model, lora)
    set_dropout(model, 1)
    for num_tokens in (16, 48):
        with kept_bytes(model.parameters()) as kept:
            output = model(torch.arange(num_tokens)[None], use_cache=False).logits
        sizes.append(sum(kept.values()))
        assert output.requires_grad
    return (sizes[1] - sizes[0]) // 32


def test_layers_ranks_and_nodes_drop_other_numbers() -> None:
    fleets = [FleetConfig(name="f", num_nodes=2, node_rank=node_rank, leader="localhost:1") for node_rank in range(2)]
    dropped: set[tuple[float, ...]] = set()
    for fleet, rank, index in product(fleets, range(3), range(3)):
        torch.manual_seed(0)  # the random state is the same everywhere
        dropout = Dropout(0.5, index)
        dropout.seed = draw_seed(rank, fleet)
        dropped.add(tuple(dropout(torch.ones(64)).tolist()))
    assert len(dropped) == 2 * 3 * 3


def test_what_dora_and_dropout_keep_for_backward_is_planned() -> None:
    shape, alone = shape_of(on_meta("llama")), kept_per_token(LoraConfig(rank=4))
    dora, dropout = LoraConfig(rank=4, use_dora=True), LoraConfig(rank=4, dropout=0.5)
    outputs, inputs = (sum(width(dora, shape, index, dim=dim) for index in range(2)) for dim in (0, 1))
    assert kept_per_token(dora) - alone == 4 * outputs > 0
    # At most: what q, k and v share without dropout, and gate and up, is kept no more.
    assert 0.5 < (kept_per_token(dropout) - alone) / ((4 + 1) * inputs) <= 1


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ({"trainer": {"mlp_tile_tokens": 8}}, "trainer.mlp_tile_tokens"),
        ({"trainer": {"compile": "blocks"}}, "trainer.compile"),
        ({"train": {"old_policy": "current"}}, "train.old_policy"),
        ({"train": {}}, "train.old_policy"),
        ({"train": {"old_policy": "given"}}, None),
    ],
)
def test_dropout_is_refused_where_masks_would_repeat_or_ratios_be_of_two_masks(
    tables: dict[str, dict[str, object]], field: str | None
) -> None:
    train = {"dataset": "x", "output_dir": "y", "reward": {"function": "f:g"}, "num_steps": 1, **tables.get("train", {})}
    trainer = {"lora": {"dropout": 0.1}, **tables.get("trainer", {})}
    with nullcontext() if field is None else pytest.raises(ValueError, match=rf"{field} .*trainer.lora.dropout"):
        config_of(trainer=trainer, **({"train": train} if "train" in tables else {}))


REFUSED = {
    "rollout.lora": ("qwen3_moe", {"rollout": {"lora": "adapter"}}, 8),
    "trainer.lora.experts": ("llama", {}, 8),
    "trainer.lora.experts ": ("gpt_oss", {}, 8),
    "trainer.lora.rank": ("qwen3_moe", {}, 12),
    "trainer.lora.rank ": ("qwen3_moe", {"device": "cpu"}, 3),
}


@pytest.mark.parametrize("field", REFUSED)
def test_adapters_of_experts_are_refused_where_they_cannot_be_computed(field: str) -> None:
    kind, tables, rank = REFUSED[field]
    with pytest.raises((InvalidArgument, ValueError)) as refused:
        lora = {"rank": rank, "target_modules": ["o_proj"], "experts": True}
        config = config_of(trainer={"compute_dtype": "float32", "lora": lora}, **tables)
        check_model(config, shape_of(on_meta(kind)))
    assert field.strip() in str(refused.value)


def test_ranks_of_a_critic_are_judged_by_their_own_key() -> None:
    def check(kind: str, critic: str, *, rank: int | None, **lora: Any) -> None:
        table = {"lora": {"rank": 8, "target_modules": ["o_proj"], **lora}, "critic": {"lora_rank": rank}}
        check_model(config_of(trainer=table), shape_of(on_meta(kind)), critic=shape_of(on_meta(critic)))

    check("qwen3_moe", "qwen3_moe", rank=16, experts=True)
    check("qwen3_moe", "qwen3", rank=None, experts=True)  # a dense critic, trained in full
    with refusing("trainer.critic.lora_rank", match="4 is not divisible by 8"):
        check("qwen3_moe", "qwen3_moe", rank=4, experts=True)
    with refusing("trainer.critic.lora_rank", match="above the 64 components"):
        check("qwen3", "qwen3", rank=65, init="pissa")


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_are_beside_every_linear_layer_that_the_family_names(kind: str) -> None:
    model = on_meta(kind)
    shape = shape_of(model)
    there = [name for layer in range(shape.num_layers) for name in shape.linear_layers(layer)]
    targets = tuple(dict.fromkeys(there))
    check_lora_targets(shape, targets)
    linear = [name for name, module in model.model.layers.named_modules() if isinstance(module, torch.nn.Linear)]
    expected = {name.rpartition(".")[2] for name in linear if not (shape.num_experts and ".mlp." in name)}
    assert set(targets) == expected
    add_adapters(model, LoraConfig(target_modules=targets))
    assert len(dict(trained_parameters(model))) == 2 * len(there)


@pytest.mark.parametrize(
    ("kind", "missing", "there"),
    [
        ("phi3", "q_proj, k_proj, v_proj, gate_proj, up_proj", "qkv_proj, o_proj, gate_up_proj, down_proj"),
        (
            "glm4_moe_lite",
            "q_proj, k_proj, v_proj, gate_proj, up_proj, down_proj",
            "q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj",
        ),
        ("glm4", "gate_proj, up_proj", "q_proj, k_proj, v_proj, o_proj, gate_up_proj, down_proj"),
    ],
)
def test_a_linear_layer_that_a_family_lacks_is_refused_by_name(kind: str, missing: str, there: str) -> None:
    with refusing("trainer.lora.target_modules", match=f"has no linear {missing}; it has {there};"):
        check_lora_targets(shape_of(on_meta(kind)), LoraConfig().target_modules)


def facts(*, policy: int | None = None, critic: int | None = -1, alpha: float | None = None, **more: object) -> CheckpointFacts:
    """Facts of networks with adapters of these ranks, or without adapters. critic: -1 for no critic."""
    ranks = {Role.POLICY: policy} | ({} if critic == -1 else {Role.CRITIC: critic})
    roles = {
        role: RoleFacts(3, schedule_start=0, architecture="LlamaForCausalLM", lora_rank=rank, lora_alpha=alpha, lora_more=more)
        for role, rank in ranks.items()
    }
    return CheckpointFacts(num_ranks=1, roles=roles)


@pytest.mark.parametrize(
    ("held", "have", "problem"),
    [
        (facts(), facts(policy=8), "a whole model as policy, but the trainer trains adapters of rank 8"),
        (facts(policy=8), facts(), "adapters of rank 8 as policy, but the trainer trains a whole model"),
        (facts(policy=8), facts(policy=16), "adapters of rank 8 as policy"),
        (
            facts(policy=8, alpha=16),
            facts(policy=8, alpha=32.5),
            "adapters with alpha 16.0 as policy, but the trainer has 32.5; load",
        ),
        (
            facts(policy=8, alpha_pattern={"q_proj": 2.0}),
            facts(policy=8),
            "with alpha_pattern {'q_proj': 2.0} as policy, but the trainer has {}",
        ),
        (facts(policy=8), facts(policy=8, type="lora"), "with type canonical_lora as policy, but the trainer has lora"),
        (
            facts(policy=8, alpha_pattern={"q_proj": 2.0, ".*_proj": 4.0}),
            facts(policy=8, alpha_pattern={".*_proj": 4.0, "q_proj": 2.0}),
            "with alpha_pattern {'q_proj': 2.0, '.*_proj': 4.0} as policy, but the trainer has {'.*_proj': 4.0",
        ),
        (facts(critic=None), facts(critic=8), "a whole model as critic"),
        (facts(), facts(critic=None), "holds policy, but the trainer trains critic, policy"),
        (facts(critic=None), facts(), "holds critic, policy, but the trainer trains policy; see"),
        (CheckpointFacts(num_ranks=1, roles={}), facts(), "holds no network, but the trainer trains policy"),
    ],
)
def test_a_checkpoint_of_another_kind_of_training_is_refused(
    tmp_path: Path, held: CheckpointFacts, have: CheckpointFacts, problem: str
) -> None:
    (tmp_path / "checkpoint.json").write_text(sealed({"format": 4, **asdict(held)}))
    with pytest.raises(InvalidArgument, match=problem):
        load_checkpoint(tmp_path, tensors={}, have=have)


@pytest.mark.parametrize("lora", ["merged", "adapter"])
def test_adapters_of_latent_attention_are_served_merged(lora: str, tmp_path: Path) -> None:
    shape = shape_of(on_meta("deepseek_v3"))
    node = {"state_dir": tmp_path, "model": {"path": tmp_path}, "rollout": {"lora": lora}}
    config = NodeConfig.model_validate(node | {"trainer": {"lora": {"target_modules": ["o_proj"]}}})
    with nullcontext() if lora == "merged" else pytest.raises(InvalidArgument, match="latent attention") as refused:
        check_model(config, shape)
    assert refused is None or refused.value.metadata["field"] == "rollout.lora"


def test_weights_of_one_rank_are_gathered_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(rank: int, width: int, scaling: float = 1.0) -> Any:
        return SimpleNamespace(a=torch.empty(rank, width), scaling=scaling)

    monkeypatch.setattr(merged_weights, "_GROUP_BYTES", 4 * 8 * 100)
    weights = [weight(8, 60), weight(8, 40), weight(8, 1), weight(8, 300), weight(4, 2), weight(4, 3), weight(4, 1, 2.0)]
    assert [[each.a.shape[1] for each in group] for group in _grouped(weights)] == [[60, 40], [1], [300], [2, 3], [1]]
