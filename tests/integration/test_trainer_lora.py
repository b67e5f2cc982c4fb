"""The trainer service of two ranks with LoRA from PEFT's adapter: only adapters learn, and all weights that leave it include them."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasuki.client.encode import loss_to_proto
from tasuki.weights.imported_weights import import_weights
from tests.integration import trainer_samples as plain
from tests.integration.trainer_process import (
    TrainerClient,
    TrainerProcess,
    ready_client,
    samples_of_now,
    serving_trainer,
)
from tests.models import make_model, save_checkpoint

# Two ranks cannot share A's rows evenly.
SETTINGS = f"""
compute_dtype = "float32"
learning_rate = {plain.LEARNING_RATE}
eps = {plain.EPS}
weight_decay = {plain.WEIGHT_DECAY}
max_grad_norm = {plain.MAX_GRAD_NORM}
micro_batch_tokens = 128
checkpointing = "full"
[trainer.lora]
rank = 23
alpha = 46
use_rslora = true
exclude_modules = ["0.self_attn.k_proj"]
path = "{{adapter}}"
[trainer.lora.rank_pattern]
"layers.1.*.(q|o)_proj" = 5
[trainer.lora.alpha_pattern]
v_proj = 7
"""
PATTERNS: dict[str, Any] = {
    "exclude_modules": ["0.self_attn.k_proj"],
    "rank_pattern": {"layers.1.*.(q|o)_proj": 5},
    "alpha_pattern": {"v_proj": 7},
}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen2_tied", seed=5), tmp_path_factory.mktemp("lora-model") / "qwen2")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that PEFT saved, with B that is not zero."""
    folder = tmp_path_factory.mktemp("adapter") / "peft"
    config = LoraConfig(r=23, lora_alpha=46, use_rslora=True, target_modules=list(ALL), init_lora_weights=False, **PATTERNS)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trainer(model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcess]:
    settings = SETTINGS.format(adapter=adapter)
    with serving_trainer(tmp_path_factory.mktemp("lora-node"), model, num_ranks=2, settings=settings) as trainer:
        yield trainer


@pytest.fixture
async def client(trainer: TrainerProcess) -> AsyncIterator[TrainerClient]:
    async with ready_client(trainer) as client:
        yield client


def with_adapter(model: Path, exported: Path) -> PeftModel:
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, exported / "adapter", is_trainable=True)


async def test_a_step_equals_that_of_peft_in_one_process(client: TrainerClient, model: Path, adapter: Path, tmp_path: Path):
    await client.export(tmp_path / "before")
    given, before = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "before" / "adapter"))
    assert given.keys() == before.keys() and all(torch.equal(tensor, before[name]) for name, tensor in given.items())
    samples = await samples_of_now(client, 20)
    for sample in samples:
        sample.temperature = plain.TEMPERATURE
    answer = await client.forward_backward(samples, loss=loss_to_proto(plain.LOSS))
    step = await client.optim_step()
    await client.export(tmp_path / "after")
    expected = plain.plain_step_of(with_adapter(model, tmp_path / "before"), samples)
    # Adapters, their two moments, and a few KB by torch for each; no weight of the model.
    num_adapted = sum(tensor.numel() for tensor in before.values())
    saved = await client.save(tmp_path / "checkpoint")
    assert 12 * num_adapted < saved.bytes < 12 * num_adapted + 400_000
    assert answer.loss == pytest.approx(expected.loss, abs=1e-5)
    assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    after = load_file(tmp_path / "after" / "adapter" / "adapter_model.safetensors")
    trained = {name.replace(".default", ""): param for name, param in expected.parameters.items() if ".lora_" in name}
    assert set(after) == set(trained)
    named = json.loads((tmp_path / "after" / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert named == sorted(ALL)  # the same bytes in each process
    assert len(after) == 2 * (2 * len(ALL) - 1)
    for name, param in trained.items():
        torch.testing.assert_close(after[name], param, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("init", "num_ranks"), [("default", 2), ("pissa", 2), ("pissa", 3)])
async def test_three_steps_of_new_adapters_equal_pefts(model: Path, tmp_path: Path, init: Any, num_ranks: int) -> None:
    """Three ranks split A within what is learned."""
    settings = SETTINGS.replace('path = "{adapter}"', f'init = "{init}"').replace("rank = 23", "rank = 22")
    options: dict[str, Any] = {"r": 22, "lora_alpha": 46, "use_rslora": True, "target_modules": list(ALL), **PATTERNS}
    with serving_trainer(tmp_path / "node", model, num_ranks=num_ranks, settings=settings) as trainer:
        async with ready_client(trainer) as client:
            await client.export(tmp_path / "begun")
            begun, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "begun", model))
            for name, tensor in begun.items():
                torch.testing.assert_close(tensor, start[name].bfloat16(), rtol=2**-7, atol=1e-6)
            theirs = with_adapter(model, tmp_path / "begun")
            if init == "pissa":
                base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
                theirs = get_peft_model(base, LoraConfig(init_lora_weights="pissa", **options))
            optimizer = plain.plain_optimizer(theirs)
            for step in range(3):
                samples = await samples_of_now(client, 20)
                for sample in samples:
                    sample.temperature = plain.TEMPERATURE
                answer = await client.forward_backward(samples, loss=loss_to_proto(plain.LOSS))
                grad_norm = (await client.optim_step()).grad_norm
                expected = plain.plain_step_of(theirs, samples, optimizer=optimizer)
                assert answer.loss == pytest.approx(expected.loss, abs=1e-5), step
                assert grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), step
            await client.export(tmp_path / "after")
            imported = import_weights((await client.publish()).weights, timeout_s=5)
            for name, tensor in load_file(tmp_path / "after" / "model.safetensors").items():
                assert torch.equal(imported.gathered(name), tensor), name
            imported.close()
    after = load_file(tmp_path / "after" / "adapter" / "adapter_model.safetensors")
    wanted = {name.replace(".default", ""): param for name, param in expected.parameters.items() if ".lora_" in name}
    assert after.keys() == wanted.keys()
    for name, param in wanted.items():
        torch.testing.assert_close(after[name][tuple(map(slice, param.shape))], param, rtol=1e-5, atol=1e-6, msg=name)


async def test_published_and_exported_weights_have_the_adapters_added_and_rounded_once(
    client: TrainerClient, model: Path, tmp_path: Path
) -> None:
    await client.forward_backward(await samples_of_now(client))
    await client.optim_step(learning_rate=0.05)
    await client.export(tmp_path / "model")
    imported = import_weights((await client.publish()).weights, timeout_s=5)
    exported, base = load_file(tmp_path / "model" / "model.safetensors"), load_file(model / "model.safetensors")
    assert set(imported.layout()) == set(exported) == set(base)
    merged = with_adapter(model, tmp_path / "model").merge_and_unload().state_dict()
    for name, tensor in exported.items():
        assert torch.equal(imported.gathered(name), tensor), name
        is_adapted = name.split(".")[-2] in ALL and name.endswith("weight") and "0.self_attn.k_proj" not in name
        assert torch.equal(tensor, base[name]) is not is_adapted, name
        # One bit of bfloat16 where the order of additions matters.
        torch.testing.assert_close(tensor.float(), merged[name], rtol=2**-7, atol=1e-6)
