"""One rank of the megatron-core backend: its steps beside FSDP2's, its bytes beside the plan's, and megatron-core's names."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.integration.one_rank import mesh
from tests.integration.test_megatron import NUM_STEPS, SETTINGS, VOCAB_SIZE, parameters, start, steps
from tests.models import make_model, save_checkpoint

__all__ = ["mesh"]

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")

NAMES = {
    "parallel_state.initialize_model_parallel": "tensor_model_parallel_size create_gloo_process_groups distributed_timeout_minutes",
    "parallel_state.destroy_model_parallel": "",
    "parallel_state.get_tensor_model_parallel_group": "",
    "parallel_state.get_data_parallel_group": "",
    "tensor_parallel.VocabParallelEmbedding": "init_method reduce_scatter_embeddings config tp_group",
    "tensor_parallel.gather_from_sequence_parallel_region": "group",
    "tensor_parallel.reduce_scatter_to_sequence_parallel_region": "group",
    "tensor_parallel.RowParallelLinear": "",
    "tensor_parallel.random.CudaRNGStatesTracker.fork": "",
    "tensor_parallel.random.model_parallel_cuda_manual_seed": "",
    "models.gpt.gpt_layer_specs.get_gpt_layer_local_spec": "qk_layernorm normalization",
    "transformer.transformer_block.TransformerBlock.forward": "attention_mask",
    "transformer.transformer_block.TransformerBlockSubmodules": "layer_specs layer_norm",
    "transformer.transformer_layer.TransformerLayerSubmodules": "input_layernorm self_attention pre_mlp_layernorm",
    "transformer.attention.SelfAttentionSubmodules": "linear_qkv core_attention linear_proj q_layernorm k_layernorm",
    "transformer.mlp.MLPSubmodules": "linear_fc1 linear_fc2",
    "transformer.mlp.MLP": "tp_group",
}
"""What the backend reads and replaces in megatron.core, and parameters that it passes."""


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_megatron_core_is_where_the_backend_looks(name: str) -> None:
    path = name.split(".")
    is_in_class = path[-2][0].isupper()
    found = import_module(f"megatron.core.{'.'.join(path[: -2 if is_in_class else -1])}")
    for part in path[-2 if is_in_class else -1 :]:
        found = getattr(found, part)
    assert set(NAMES[name].split()) <= set(inspect.signature(found).parameters)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen3", seed=3, vocab_size=VOCAB_SIZE), tmp_path_factory.mktemp("model") / "qwen3")


def test_three_clipped_steps_are_those_of_fsdp(mesh: DeviceMesh, model: Path) -> None:
    results = []
    for tensor_parallel in (None, 1):
        learner = start(model, mesh=mesh, tensor_parallel=tensor_parallel)
        results.append((steps(learner, NUM_STEPS), parameters(learner)))
        learner.backend.close()
    (expected, others), (found, weights) = results
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=1e-6)
    assert min(step["grad_norm"] for step in expected) > SETTINGS["max_grad_norm"]
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6, msg=name)
