"""Steps of adapters as PEFT has them, in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from tasuki.trainer.backends.fsdp.lora.adapters import adapter_tensors, in_file
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tests.integration import trainer_samples as plain
from tests.integration.learning import fsdp, learn, start_learner, trained
from tests.integration.one_rank import mesh, model
from tests.models import VOCAB_SIZE

__all__ = ["mesh", "model"]

NUM_LAYERS = 2


@pytest.mark.parametrize("options", [{"use_dora": True}, {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}}])
def test_a_step_of_adapters_equals_pefts(mesh: DeviceMesh, model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    settings = {"learning_rate": plain.LEARNING_RATE, "eps": plain.EPS, "weight_decay": plain.WEIGHT_DECAY}
    lora = {"rank": 4, "init": "gaussian", "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    given = plain.make_samples(12, vocab_size=VOCAB_SIZE, temperature=plain.TEMPERATURE)
    learner = start_learner(model, mesh=mesh, max_grad_norm=plain.MAX_GRAD_NORM, checkpointing="full", lora=lora, **settings)
    backend = fsdp(learner)
    for step in range(2):  # B is zero in the first
        backend.export_model(tmp_path / f"{step}")
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, tmp_path / f"{step}" / "adapter", is_trainable=True)
        expected = plain.plain_step_of(theirs, given)
        report = learn(learner, Role.POLICY, decode_samples(given), config=plain.LOSS, max_tokens=64)
        assert report.loss == pytest.approx(expected.loss, abs=1e-5)
        learner.optim_step(Role.POLICY, schedule_steps=3)
        backend.reset_optimizer(Role.POLICY)
        found = dict(adapter_tensors(backend._policy.causal_lm))
        wanted = {
            in_file(name.removeprefix("base_model.model."), param)[0]: param for name, param in expected.parameters.items()
        }
        assert len(found) == 3 * 3 * NUM_LAYERS
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
    backend.close()


def test_new_adapters_with_dora_change_nothing_in_bfloat16(mesh: DeviceMesh, model: Path) -> None:
    learner = start_learner(model, mesh=mesh, compute_dtype="bfloat16", lora={"rank": 4, "use_dora": True})
    batch = [token_batch(decode_samples(plain.make_samples(4, vocab_size=VOCAB_SIZE)), device=learner.backend.device)]
    policy, reference = (learner.score(role, batch)[0].tolist() for role in (Role.POLICY, Role.REFERENCE))
    assert policy == reference


def test_adapters_begin_as_pefts_gaussian(mesh: DeviceMesh, model: Path) -> None:
    learner = start_learner(model, mesh=mesh, lora={"rank": 4, "init": "gaussian", "target_modules": ["q_proj", "o_proj"]})
    network = trained(learner, Role.POLICY).network.causal_lm
    config = LoraConfig(r=4, init_lora_weights="gaussian", target_modules=["q_proj", "o_proj"])
    theirs = inject_adapter_in_model(config, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    torch.manual_seed(0)
    for layer in theirs.modules():
        if isinstance(layer, LoraLayer):
            layer.reset_lora_parameters("default", "gaussian")
    expected = dict(theirs.named_parameters())
    adapters = {name: param for name, param in network.named_parameters() if ".lora_" in name}
    assert len(adapters) == 2 * 2 * 2
    assert all(torch.equal(param.full_tensor(), expected[name]) for name, param in adapters.items())
