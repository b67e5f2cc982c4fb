"""Steps of adapters as PEFT has them, in one process."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tasuki.config.trainer_schema import LoraConfig
from tasuki.trainer.backends.fsdp.lora.adapters import adapter_tensors
from tasuki.trainer.backends.fsdp.lora.merged_weights import MergedWeights
from tasuki.trainer.backends.fsdp.shards import local_shards, merged_shards
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.learner import Learner
from tasuki.trainer.modules.lora import EXPERT_B, Dropout, in_file, peft_config
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.weights.export import fill_shards
from tasuki.wire.errors import InvalidArgument
from tests.integration import trainer_samples as plain
from tests.integration.learning import assert_equal, fsdp, learn, start_learner, train, trained, whole_parameters
from tests.integration.one_rank import mesh, model
from tests.models import TOWER, VOCAB_SIZE, make_model, save_checkpoint
from tests.vision import put_images, take_images

__all__ = ["mesh", "model"]

NUM_LAYERS, TARGETS = 2, ["q_proj", "v_proj", "down_proj"]


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}},
        {"images": True},
        {"images": True, "tower": True, "exclude_modules": ["blocks.1.mlp.linear_fc1"]},
    ],
)
def test_a_step_of_adapters_equals_pefts(mesh: DeviceMesh, model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    auto, options = cast(Any, AutoModelForCausalLM), dict(options)
    given = plain.make_samples(12, vocab_size=VOCAB_SIZE, temperature=plain.TEMPERATURE)
    images, texts = None, deepcopy(given)
    if options.pop("images", False):
        auto, model = AutoModelForImageTextToText, save_checkpoint(make_model("qwen3_vl", seed=3), tmp_path / "model")
        put_images(given)
        texts = deepcopy(given)
        images = take_images(texts)
    settings = {"learning_rate": plain.LEARNING_RATE, "eps": plain.EPS, "weight_decay": plain.WEIGHT_DECAY}
    lora = {"rank": 4, "init": "gaussian", "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    samples = replace(decode_samples(texts), images=images)
    learner = start_learner(model, mesh=mesh, max_grad_norm=plain.MAX_GRAD_NORM, checkpointing="full", lora=lora, **settings)
    backend = fsdp(learner)
    for step in range(2):  # B is zero in the first
        backend.export_model(tmp_path / f"{step}")
        base = auto.from_pretrained(model, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, tmp_path / f"{step}" / "adapter", is_trainable=True)
        expected = plain.plain_step_of(theirs, given)
        report = learn(learner, Role.POLICY, samples, config=plain.LOSS, max_tokens=160)
        assert report.loss == pytest.approx(expected.loss, abs=1e-5)
        learner.optim_step(Role.POLICY, schedule_steps=3)
        backend.reset_optimizer(Role.POLICY)
        found = dict(adapter_tensors(backend._policy.causal_lm))
        wanted = {
            in_file(name.removeprefix("base_model.model."), param)[0]: param for name, param in expected.parameters.items()
        }
        num_adapted = 3 * NUM_LAYERS + (4 * TOWER["depth"] - 1 + 3 * 2 if lora.get("tower") else 0)
        assert len(found) == num_adapted * (3 if lora.get("use_dora") else 2)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name.replace("language_model.", "")], rtol=1e-5, atol=1e-6, msg=name)
    backend.close()


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"init": "pissa"}])
def test_a_step_with_dropout_is_pefts_with_the_same_masks(
    mesh: DeviceMesh, model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    settings = {"learning_rate": plain.LEARNING_RATE, "eps": plain.EPS, "weight_decay": plain.WEIGHT_DECAY}
    lora = {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "dropout": 0.3, **options}
    made = plain.make_samples(9, vocab_size=VOCAB_SIZE, temperature=plain.TEMPERATURE)
    given = [max(made, key=lambda sample: len(sample.completion_token_ids))]
    learner = start_learner(model, mesh=mesh, max_grad_norm=plain.MAX_GRAD_NORM, checkpointing="full", lora=lora, **settings)
    backend, masks = fsdp(learner), dict[str, torch.Tensor]()
    torch.manual_seed(1)
    for name, param in trained(learner, Role.POLICY).network.causal_lm.named_parameters():
        if ".lora_B" in name and "init" not in options:
            cast(DTensor, param).to_local().data.normal_(std=0.1)
    for name, module in backend._policy.causal_lm.named_modules():
        if isinstance(module, Dropout):

            def record(_: Any, inputs: Any, output: torch.Tensor, name: str = name) -> None:
                mask = (output != 0).float() / 0.7
                assert torch.equal(masks.setdefault(name, mask), mask), "a recomputation has the same"
                torch.testing.assert_close(inputs[0] * mask, output)

            module.register_forward_hook(record)
    backend.export_model(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0.3
    learn(learner, Role.POLICY, decode_samples(given), config=plain.LOSS)
    learner.optim_step(Role.POLICY, schedule_steps=3)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if "init" in options:
        theirs = get_peft_model(base, PeftConfig(r=4, lora_alpha=32, init_lora_weights="pissa", target_modules=TARGETS)).train()
    else:
        theirs = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter", is_trainable=True).train()
    for name, mask in masks.items():

        class Replayed(torch.nn.Module):
            def forward(self, x: torch.Tensor, mask: torch.Tensor = mask) -> torch.Tensor:
                # The last token has no successor, so ours leaves it out.
                return torch.cat([x[:, : mask.shape[1]] * mask, x[:, mask.shape[1] :]], dim=1)

        layer = theirs.base_model.model.get_submodule(name.removesuffix(".lora_dropout.default"))
        layer.lora_dropout["default"] = Replayed()
    expected, found = plain.plain_step_of(theirs, given), adapter_tensors(backend._policy.causal_lm)
    wanted = {in_file(name.removeprefix("base_model.model."), param)[0]: param for name, param in expected.parameters.items()}
    assert len({mask.mean().item() for mask in masks.values()}) > 3, "layers have their own"
    for name, tensor in found.items():
        torch.testing.assert_close(tensor[tuple(map(slice, wanted[name].shape))], wanted[name], rtol=1e-5, atol=1e-6, msg=name)
    backend.close()


def test_dropout_is_repeated_after_a_resumption_and_absent_from_scores(mesh: DeviceMesh, model: Path, tmp_path: Path) -> None:
    lora, samples = {"rank": 4, "dropout": 0.5}, decode_samples(plain.make_samples(9, vocab_size=VOCAB_SIZE))
    learner, plain_learner = (start_learner(model, mesh=mesh, lora=lora | more) for more in ({}, {"dropout": 0.0}))

    def stepped(learner: Learner) -> dict[str, torch.Tensor]:
        learn(learner, Role.POLICY, samples, config=plain.LOSS, max_tokens=64)
        learner.optim_step(Role.POLICY, learning_rate=0.01)
        return adapter_tensors(fsdp(learner)._policy.causal_lm)

    first = stepped(learner)
    learner.save_checkpoint(tmp_path / "saved")
    second = stepped(learner)
    learner.load_checkpoint(tmp_path / "saved")
    again = stepped(learner)
    assert all(torch.equal(tensor, again[name]) for name, tensor in second.items())
    assert not all(torch.equal(tensor, stepped(plain_learner)[name]) for name, tensor in first.items())
    batch = [token_batch(samples, device=learner.backend.device)]
    assert learner.score(Role.POLICY, batch)[0].tolist() == learner.score(Role.POLICY, batch)[0].tolist()


@pytest.mark.parametrize(
    ("lora", "more"),
    [
        ({}, {}),
        ({}, {"moments": "host"}),
        ({"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}}, {}),
        ({"use_dora": True}, {}),
        ({"tower": True}, {}),
    ],
)
def test_three_steps_of_pissa_equal_pefts(
    mesh: DeviceMesh, model: Path, tmp_path: Path, lora: dict[str, Any], more: dict[str, Any]
) -> None:
    auto, given = cast(Any, AutoModelForCausalLM), plain.make_samples(9, vocab_size=VOCAB_SIZE, temperature=plain.TEMPERATURE)
    images, texts = None, deepcopy(given)
    if "tower" in lora:
        auto, model = AutoModelForImageTextToText, save_checkpoint(make_model("qwen3_vl", seed=3), tmp_path / "model")
        put_images(given)
        texts = deepcopy(given)
        images = take_images(texts)
    samples = replace(decode_samples(texts), images=images)
    table = {"rank": 4, "alpha": 8, "target_modules": TARGETS, "init": "pissa", **lora}
    settings = {"learning_rate": plain.LEARNING_RATE, "eps": plain.EPS, "weight_decay": plain.WEIGHT_DECAY, **more}
    learner = start_learner(model, mesh=mesh, max_grad_norm=plain.MAX_GRAD_NORM, lora=table, **settings)
    causal_lm, batch = fsdp(learner)._policy.causal_lm, [token_batch(samples, device=learner.backend.device)]
    first, begun, reference = (
        adapter_tensors(causal_lm),
        learner.score(Role.POLICY, batch)[0],
        learner.score(Role.REFERENCE, batch)[0],
    )
    torch.testing.assert_close(begun, reference, rtol=0, atol=5e-6)
    config = peft_config(LoraConfig.model_validate(table | {"init": "default"}), has_tower="tower" in lora)
    config.init_lora_weights = "pissa"
    theirs = get_peft_model(auto.from_pretrained(model, dtype=torch.float32), config)
    optimizer = plain.plain_optimizer(theirs)
    for _ in range(3):
        expected = plain.plain_step_of(theirs, given, optimizer=optimizer)
        report = learn(learner, Role.POLICY, samples, config=plain.LOSS, max_tokens=160)
        step = learner.optim_step(Role.POLICY)
        assert report.loss == pytest.approx(expected.loss, abs=1e-5)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5) and step.grad_norm > plain.MAX_GRAD_NORM
    found = {name.replace("language_model.", ""): tensor for name, tensor in adapter_tensors(causal_lm).items()}
    wanted = {in_file(name.removeprefix("base_model.model."), param)[0]: param for name, param in expected.parameters.items()}
    assert len(found) == len(first) == sum(".lora_" in name for name in wanted)
    for name, tensor in found.items():
        learned = tensor[tuple(map(slice, wanted[name].shape))]
        torch.testing.assert_close(learned, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
    for name, tensor in adapter_tensors(causal_lm).items():
        if "magnitude" not in name:
            dim = int("lora_B" in name)
            (moved, kept), (_, before) = (each.chunk(2, dim=dim) for each in (tensor, first[name]))
            assert torch.equal(kept, before) and not torch.allclose(moved.abs(), kept.abs()), name
    fsdp(learner).export_model(tmp_path / "exported")
    loaded = PeftModel.from_pretrained(auto.from_pretrained(model, dtype=torch.float32), tmp_path / "exported" / "adapter")
    with torch.no_grad():
        outputs = [each(input_ids=torch.arange(3, 40)[None]).logits for each in (loaded, theirs)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=2e-5)
    fsdp(learner).close()


def test_pissa_in_8_bits_by_a_fast_decomposition_begins_as_the_model_and_resumes_bit_equal(
    mesh: DeviceMesh, model: Path, tmp_path: Path
) -> None:
    """The critic's too, whose adapters are another rank's."""
    lora, critic = {"rank": 4, "target_modules": TARGETS, "init": "pissa_niter_4"}, {"lora_rank": 8}
    settings = {"moments": "8bit", "weight_decay": 0.1, "learning_rate": 1e-3, "critic": critic}
    one, other = (start_learner(model, mesh=mesh, lora=lora, **settings) for _ in range(2))
    batch = [token_batch(decode_samples(plain.make_samples(4, vocab_size=VOCAB_SIZE)), device=one.backend.device)]
    policy, reference = (one.score(role, batch)[0] for role in (Role.POLICY, Role.REFERENCE))
    torch.testing.assert_close(policy, reference, rtol=0, atol=5e-6)
    first = {role: whole_parameters(one, role) for role in (Role.POLICY, Role.CRITIC)}
    train(one, 2)
    one.save_checkpoint(tmp_path / "saved")
    train(one, 1)
    other.load_checkpoint(tmp_path / "saved")
    train(other, 1)
    for role, before in first.items():
        after = whole_parameters(one, role)
        assert_equal(whole_parameters(other, role), after)
        for name in before:
            if ".lora_B" in name:
                assert torch.equal(before[name].chunk(2, dim=1)[1], after[name].chunk(2, dim=1)[1]), name
                assert not torch.equal(before[name].chunk(2, dim=1)[0], after[name].chunk(2, dim=1)[0]), name
    plain_learner = start_learner(model, mesh=mesh, lora=lora | {"init": "default", "rank": 8}, **settings)
    with pytest.raises(InvalidArgument, match="rank 4 as policy, but"):
        plain_learner.load_checkpoint(tmp_path / "saved")
    for learner in (one, other, plain_learner):
        fsdp(learner).close()


def test_new_adapters_with_dora_change_nothing_in_bfloat16(mesh: DeviceMesh, model: Path) -> None:
    learner = start_learner(model, mesh=mesh, compute_dtype="bfloat16", lora={"rank": 4, "use_dora": True})
    batch = [token_batch(decode_samples(plain.make_samples(4, vocab_size=VOCAB_SIZE)), device=learner.backend.device)]
    policy, reference = (learner.score(role, batch)[0].tolist() for role in (Role.POLICY, Role.REFERENCE))
    assert policy == reference


def test_adapters_begin_as_pefts_gaussian(mesh: DeviceMesh, model: Path) -> None:
    learner = start_learner(model, mesh=mesh, lora={"rank": 4, "init": "gaussian", "target_modules": ["q_proj", "o_proj"]})
    network = trained(learner, Role.POLICY).network.causal_lm
    config = PeftConfig(r=4, init_lora_weights="gaussian", target_modules=["q_proj", "o_proj"])
    theirs = inject_adapter_in_model(config, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    torch.manual_seed(0)
    for layer in theirs.modules():
        if isinstance(layer, LoraLayer):
            layer.reset_lora_parameters("default", "gaussian")
    expected = dict(theirs.named_parameters())
    adapters = {name: param for name, param in network.named_parameters() if ".lora_" in name}
    assert len(adapters) == 2 * 2 * 2
    assert all(torch.equal(param.full_tensor(), expected[name]) for name, param in adapters.items())


@pytest.mark.parametrize(
    ("kind", "has_tower"),
    [
        *((kind, False) for kind in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen2_5_vl", "qwen3_vl", "mixtral")),
        *((kind, True) for kind in ("qwen3_5", "qwen2_5_vl")),
    ],
)
def test_merged_weights_have_the_names_that_are_published(mesh: DeviceMesh, tmp_path: Path, kind: str, has_tower: bool) -> None:
    folder = save_checkpoint(make_model(kind, seed=0), tmp_path / "model")
    # A tower with layers of the same names has no adapters.
    targets = ["q_proj", "down_proj" if kind == "qwen2_5_vl" else "o_proj"]
    learner = start_learner(folder, mesh=mesh, lora={"rank": 4, "target_modules": targets, "tower": has_tower})
    causal_lm = fsdp(learner)._policy.causal_lm
    merged = MergedWeights(causal_lm)
    assert any("visual." in name for name in merged.names) is has_tower
    assert merged.names and merged.names == merged.by_name.keys()
    assert merged.names <= {shard.name for shard in local_shards(causal_lm)}
    fsdp(learner).close()


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe"])
def test_published_experts_have_their_own_adapters_added(mesh: DeviceMesh, tmp_path: Path, kind: str) -> None:
    """One by one, or whole as in the checkpoints of Qwen3.5."""
    folder = save_checkpoint(make_model(kind, seed=0), tmp_path / "model")
    learner = start_learner(folder, mesh=mesh, lora={"rank": 4, "target_modules": ["o_proj"], "experts": True})
    causal_lm = fsdp(learner)._policy.causal_lm
    for name, param in causal_lm.named_parameters():
        if name.endswith(EXPERT_B):
            cast(DTensor, param).to_local().data.normal_()
    places = [(shard, torch.empty(shard.local.shape)) for shard in merged_shards(causal_lm) if shard.write is not None]
    assert places
    fill_shards(places)
    fsdp(learner).export_model(tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for shard, held in places:
        assert torch.equal(held.to(exported[shard.name].dtype), exported[shard.name]), shard.name
    fsdp(learner).close()
