"""A step of FSDP2 with compiled layers against one without."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.backends.fsdp import model as networks
from tasuki.trainer.backends.fsdp.compiled_layers import compile_layers
from tasuki.trainer.roles import Role
from tasuki.trainer.service.requests import decode_samples
from tests.integration.learning import learn, start_learner, whole_gradients
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", ["attention", "full"])
def test_a_sharded_step_is_equal_to_rounding(
    mesh: DeviceMesh, tmp_path: Path, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiler behind it takes minutes on a CPU; what is compiled is the same.
    monkeypatch.setattr(networks, "compile_layers", partial(compile_layers, backend="aot_eager"))
    path = save_checkpoint(make_model("qwen2", seed=0), tmp_path / "qwen2")
    samples = decode_samples(make_samples(12, vocab_size=VOCAB_SIZE))
    gradients: list[dict[str, torch.Tensor]] = []
    for compiles_layers in (False, True):
        learner = start_learner(path, mesh=mesh, compile_layers=compiles_layers, checkpointing=checkpointing)
        for max_tokens in (32, 40):
            learn(learner, Role.POLICY, samples, config=LossConfig(), max_tokens=max_tokens)
        gradients.append(whole_gradients(learner, Role.POLICY))
        learner.backend.close()
    plain, compiled = gradients
    assert plain.keys() == compiled.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-5, atol=1e-5, msg=name)
