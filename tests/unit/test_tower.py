"""Images in the trainer, against transformers' vision model."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tasuki.config.checks import check_model
from tasuki.config.schema import NodeConfig
from tasuki.config.trainer_schema import LoraConfig
from tasuki.models.known import read_model
from tasuki.models.tower import Tower
from tasuki.planner.node import Part
from tasuki.planner.plan import plan
from tasuki.planner.trainer_bytes import checkpoint_bytes, frozen_bytes, gradient_bytes
from tasuki.trainer.backends.fsdp.lora.adapters import adapted_parameters, add_adapters
from tasuki.trainer.data.cost import SampleCost, sample_cost
from tasuki.trainer.data.micro_batch import SequencePart, token_batch
from tasuki.trainer.data.plan import Sharing, _groups_of_prompts, plan_shared
from tasuki.wire.errors import InvalidArgument, UnsupportedModel
from tests.models import make_model, with_tower
from tests.planned import node_with
from tests.refusal import refusing
from tests.unit.test_packed_attention import policy_of
from tests.vision import image_samples, plain_image_log_probs, plain_pixels

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def text(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param, seed=5)


@pytest.fixture(scope="module")
def tower(text: Any) -> Tower:
    found = read_model({**text.config.to_dict(), "architectures": [type(text).__name__]}).shape.tower
    assert found is not None
    return found


@pytest.mark.parametrize("is_trained", [False, True])
def test_packed_images_score_and_train_as_transformers_does(text: Any, tower: Tower, is_trained: bool) -> None:
    whole, policy, samples = with_tower(text), policy_of(text), image_samples(tower)
    policy.causal_lm.visual.requires_grad_(is_trained)
    expected_N = plain_image_log_probs(whole, samples)
    packed_N, _ = policy(token_batch(samples, device=CPU))
    torch.testing.assert_close(packed_N, expected_N, rtol=0, atol=1e-5)
    separate = [policy(token_batch(samples.select([index]), device=CPU))[0] for index in range(len(samples))]
    torch.testing.assert_close(torch.cat(separate), expected_N, rtol=0, atol=1e-5)
    packed_N.sum().backward()
    expected_N.sum().backward()
    exact = {
        name.replace("language_model.", "").replace("model.visual.", "visual."): param
        for name, param in whole.named_parameters()
    }
    for name, param in policy.causal_lm.named_parameters():
        assert (param.grad is None) is (name.startswith("visual.") and not is_trained)
        if param.grad is not None:
            torch.testing.assert_close(
                param.grad, exact[name].grad, rtol=1e-4, atol=1e-4 if name.startswith("visual.") else 1e-5
            )
    policy.causal_lm.get_buffer("visual.rotary_pos_emb.inv_freq").mul_(1.5)
    assert not torch.allclose(policy(token_batch(samples, device=CPU))[0], expected_N, atol=1e-3)


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_trained_tower_has_gradients_and_moments_in_the_plan(text: Any, is_trained: bool) -> None:
    shape = read_model({**text.config.to_dict(), "architectures": [type(text).__name__]}).shape
    node = node_with(shape, trainer={"train_tower": is_trained})
    numel = (
        shape.num_parameters
        if is_trained
        else sum(param.numel() for name, param in text.named_parameters() if "visual." not in name)
    )
    assert gradient_bytes(node) == 4 * numel
    assert frozen_bytes(node) == 4 * (shape.num_parameters - numel)
    assert checkpoint_bytes(node) == pytest.approx(3 * 4 * numel, rel=0.01)


@pytest.mark.parametrize("has_tower", [False, True])
def test_adapters_of_a_tower_are_planned_as_they_are_added(text: Any, has_tower: bool) -> None:
    shape = read_model({**text.config.to_dict(), "architectures": [type(text).__name__]}).shape
    lora = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"), tower=has_tower, exclude_modules=("blocks.0.attn.proj",))
    network = deepcopy(text)
    add_adapters(network, lora)
    adapted = adapted_parameters(network)
    assert sorted(name.removesuffix(".weight") for name in adapted) == sorted(lora.layers(shape))
    towers = {name for name in adapted if name.startswith("visual.")}
    kinds = {
        name for name, module in network.visual.named_modules() if isinstance(module, torch.nn.Linear) and ".lora_" not in name
    }
    assert {f"visual.{name.removesuffix('.base_layer')}.weight" for name in kinds} - towers == (
        {"visual.blocks.0.attn.proj.weight"} if has_tower else {f"visual.{name}.weight" for name in kinds}
    )
    assert has_tower is any(param.requires_grad for param in network.visual.parameters())


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_have_the_whole_batchs_images_in_their_own_places(tower: Tower, num_parts: int) -> None:
    samples = image_samples(tower)
    whole = token_batch(samples, device=CPU)
    parts = [token_batch(samples, device=CPU, part=SequencePart(index, num_parts)) for index in range(num_parts)]
    width, places, rows = len(parts[0].input_ids_T), list[int](), list[int]()
    assert whole.images is not None and whole.positions_3T is not None
    for index, part in enumerate(parts):
        assert part.images is not None and part.positions_3T is not None
        assert torch.equal(part.images.levels_PD, whole.images.levels_PD)
        places += (part.images.places_I + width * index).tolist()
        rows += part.images.rows_I.tolist()
        kept = whole.positions_3T[:, width * index : width * (index + 1)]
        assert torch.equal(part.positions_3T[:, : kept.shape[1]], kept)
    assert (places, rows) == (whole.images.places_I.tolist(), whole.images.rows_I.tolist())


def test_an_image_of_several_samples_is_encoded_once_and_prompts_with_other_images_are_not_shared(tower: Tower) -> None:
    samples = image_samples(tower)
    assert samples.images is not None
    chosen = samples.select([5, 0, 4])
    batch = token_batch(chosen, device=CPU)
    assert chosen.images is not None and batch.images is not None
    assert batch.images.grids_U3.tolist() == [[1, 4, 6]] and len(batch.images.places_I) == 3 * 6
    assert _groups_of_prompts(samples) == [[4, 5]]
    samples.images.image_I[-1] = 3
    assert _groups_of_prompts(samples) == []


def test_a_sample_is_charged_for_the_products_of_its_images_in_the_tower(text: Any, tower: Tower) -> None:
    cost = sample_cost(read_model({**text.config.to_dict(), "architectures": [type(text).__name__]}))
    samples, visual = image_samples(tower), deepcopy(text.visual)
    assert samples.images is not None
    visual.set_attn_implementation("eager")  # whose products are counted
    charged_S = cost.image_flops(samples.images)
    for index in range(len(samples)):
        assert samples.images is not None
        one = samples.images.select(np.array([index])).used()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            if len(one.grids_U3):
                visual(plain_pixels(one.levels_PD, one.values_CL), grid_thw=torch.tensor(one.grids_U3))
        counted = counter.get_total_flops()  # attention is charged as if it had no windows
        assert charged_S[index] >= counted if tower.has_windows else charged_S[index] == counted
    plan = plan_shared(
        samples, num_ranks=2, max_tokens=200, cost=SampleCost(linear=0, quadratic=0, patch=1), sharing=Sharing.NEVER
    )[1]
    assert [3] in [part for rank in plan for part in rank]


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("vision_config", {"vision_config": 3}),
        ("image_token_id", {"image_token_id": None}),
        ("depth", {"vision_config": {"depth": 0}}),
        ("hidden_act", {"vision_config": {"hidden_act": "gelu"}}),
        ("rope_parameters", {"vision_config": {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "axial"}}}),
        ("out_hidden_size", {"vision_config": {"out_hidden_size": 32}}),
        ("deepstack_visual_indexes", {"vision_config": {"deepstack_visual_indexes": [1, 0]}}),
        ("mrope_section", {"rope_parameters": {"mrope_section": [4, 2, 1]}}),
    ],
)
def test_what_trainer_and_engine_would_read_otherwise_of_a_tower_is_refused_by_name(
    text: Any, key: str, changes: dict[str, Any]
) -> None:
    table = {**text.config.to_dict(), "architectures": [type(text).__name__]}
    for name, value in changes.items():
        table[name] = table[name] | value if isinstance(value, dict) else value
    with pytest.raises((InvalidArgument, UnsupportedModel)) as refused:
        read_model(table)
    assert refused.value.metadata["field"] == key


@pytest.mark.parametrize(
    ("kind", "key", "changes"),
    [
        ("qwen3_vl", "window_size", {"vision_config": {"window_size": 112}}),
        ("qwen3_vl", "rms_norm_eps", {"rms_norm_eps": 1e-5}),
        ("qwen2_5_vl", "window_size", {"vision_config": {"window_size": 7}}),
        ("qwen2_5_vl", "fullatt_block_indexes", {"vision_config": {"fullatt_block_indexes": [3]}}),
    ],
)
def test_what_one_tower_cannot_have_is_refused_by_name(kind: str, key: str, changes: dict[str, Any]) -> None:
    test_what_trainer_and_engine_would_read_otherwise_of_a_tower_is_refused_by_name(make_model(kind, seed=5), key, changes)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("rollout.tp_size", {"rollout": {"tp_size": 4}}),
        ("rollout.lora", {"trainer": {"lora": {"target_modules": ["down_proj"]}}, "rollout": {"lora": "adapter"}}),
        ("trainer.train_tower", {"trainer": {"train_tower": True, "lora": {}}}),
        ("rollout.engine.speculative_algorithm", {"device": "cuda", "rollout": {"engine": {"speculative_algorithm": "NGRAM"}}}),
    ],
)
def test_what_a_model_with_a_tower_cannot_have_is_refused_by_name(
    text: Any, field: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    shape = read_model({**text.config.to_dict(), "architectures": [type(text).__name__]}).shape
    plain = {"state_dir": tmp_path, "model": {"path": tmp_path}}
    check_model(NodeConfig.model_validate(plain), shape)
    with pytest.raises(InvalidArgument, match=r"trainer.train_tower: needs a vision tower"):
        check_model(NodeConfig.model_validate(plain | {"trainer": {"train_tower": True}}), replace(shape, tower=None))
    with refusing(field):
        check_model(NodeConfig.model_validate(plain | settings), shape)


def test_the_hosts_copies_of_a_steps_images_are_planned_up_to_a_calls_limit(text: Any) -> None:
    shape = read_model({**text.config.to_dict(), "architectures": [type(text).__name__]}).shape
    train = {
        "dataset": "d",
        "output_dir": "o",
        "num_steps": 1,
        "reward": {"function": "m:f"},
        "oversample": 1.5,
        "max_staleness": 4,
    }
    train |= {"prompts_per_step": 10, "max_prompt_tokens": 60, "max_new_tokens": 40}
    assert Part.IMAGES not in plan(node_with(replace(shape, tower=None))).stages[0].host
    for more, kept in (({}, 2), ({"num_steps": 3}, 2 * 3), ({"eval_dataset": "e"}, 0)):
        few, many = (
            plan(node_with(shape, num_ranks=2, train=train | more | {"prompts_per_step": num})).stages[0].host[Part.IMAGES]
            for num in (10, 20)
        )
        assert many - few == 15 * 100 * (4 * 3 * 4 * 4) * (
            3 + 4 * 2 + kept
        )  # prompts, tokens, bytes of a token's pixels, copies
    sft = {"dataset": "d", "output_dir": "o", "samples_per_step": 10, "max_tokens": 50}
    assert plan(node_with(shape, sft=sft)).stages[0].host[Part.IMAGES] == (
        500 * (4 * 3 * 4 * 4) * (3 + 4) + (3 << 30) + 22 * (1 << 26)
    )
    for settings in ({"train": train | {"prompts_per_step": 10**8}}, {}):
        assert plan(node_with(shape, **settings)).stages[0].host[Part.IMAGES] == (3 << 29) * (5 + 4) + 22 * (1 << 26)
