"""One rank of the megatron-core backend: its steps beside FSDP2's, its bytes beside the plan's, and megatron-core's names."""

import inspect
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from tasuki.planner.choose import chosen
from tasuki.planner.kept_bytes import kept_per_token
from tasuki.planner.node import Checkpointing, Node, Part, node_of
from tasuki.planner.step_bytes import step_moments
from tasuki.planner.trainer_bytes import _kept_tensors, _moments
from tasuki.trainer.data.micro_batch import TokenBatch
from tasuki.trainer.learner import Learner
from tasuki.trainer.modules.lora import Dropout
from tasuki.trainer.wire import Role
from tests.integration.launched import run_ranks
from tests.integration.one_rank import mesh
from tests.integration.test_megatron import DENSE, NUM_STEPS, SETTINGS, SPARSE, VOCAB_SIZE, parameters, start, steps
from tests.models import make_model, save_checkpoint
from tests.saved_tensors import kept_bytes
from tests.unit.test_plan_step import LiveTokens

__all__ = ["mesh"]

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")

NAMES = {
    "parallel_state.initialize_model_parallel": "tensor_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "create_gloo_process_groups distributed_timeout_minutes",
    "parallel_state.destroy_model_parallel": "",
    "parallel_state.get_tensor_model_parallel_group": "",
    "parallel_state.get_data_parallel_group": "",
    "parallel_state.get_expert_model_parallel_group": "",
    "parallel_state.get_expert_data_parallel_group": "",
    "tensor_parallel.VocabParallelEmbedding": "init_method reduce_scatter_embeddings config tp_group",
    "tensor_parallel.gather_from_sequence_parallel_region": "tensor_parallel_output_grad group",
    "tensor_parallel.reduce_scatter_to_sequence_parallel_region": "group",
    "tensor_parallel.RowParallelLinear": "skip_bias_add",
    "tensor_parallel.ColumnParallelLinear": "skip_bias_add",
    "tensor_parallel.random.CudaRNGStatesTracker.fork": "",
    "tensor_parallel.random.model_parallel_cuda_manual_seed": "",
    "models.gpt.gpt_layer_specs.get_gpt_layer_local_spec": "qk_layernorm normalization",
    "transformer.transformer_block.TransformerBlock.forward": "attention_mask",
    "transformer.transformer_block.TransformerBlockSubmodules": "layer_specs layer_norm",
    "transformer.transformer_layer.TransformerLayerSubmodules": "input_layernorm self_attention pre_mlp_layernorm mlp",
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


NUM_TOKENS = 514
"""No parameter has this size, half of it, or twice."""
NUM_CHOSEN = 2
"""Experts of a token."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 4 * VOCAB_SIZE, "hidden_size": 192, "intermediate_size": 448}
    return {kind: save_checkpoint(make_model(kind, seed=3, **sizes), folder / kind) for kind in (*DENSE, SPARSE)}


def test_three_clipped_steps_are_those_of_fsdp(mesh: DeviceMesh, models: dict[str, Path]) -> None:
    results = []
    for tensor_parallel in (None, 1):
        learner = start(models["qwen3"], mesh=mesh, tensor_parallel=tensor_parallel)
        results.append((steps(learner, NUM_STEPS), parameters(learner)))
        learner.backend.close()
    (expected, others), (found, weights) = results
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=1e-6)
    assert min(step["grad_norm"] for step in expected) > SETTINGS["max_grad_norm"]
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6, msg=name)


def planned(learner: Learner) -> Node:
    backend = cast(Any, learner.backend)
    return chosen(node_of(backend._node, gpu_bytes=1, host_bytes=1), backend._choices)


def check_tags(learner: Learner) -> None:
    """Tensors of weights, gradients and moments have the bytes of the plan, which rounds each arena."""
    optimizer, weights = cast(Any, learner.backend)._optimizer, list[torch.Tensor]()
    policy = cast(Any, learner.backend)._policy
    for part in (*policy.parts, *policy.adapters):
        weights += [part.buffer] if part.buffer.dtype is part.weights.dtype else [part.buffer, part.weights]
    moments = [state[name] for state in optimizer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    node = planned(learner)
    for tensors, sizes in zip((weights, optimizer._buffers, moments), (*_kept_tensors(node), _moments(node)), strict=True):
        # Five rows of a router over two ranks.
        rel = 0.002 if node.model.num_experts else 0
        assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(sum(sizes), rel=rel)


def check_step(learner: Learner) -> None:
    """A layer keeps, and a step has at its peak, what the plan says."""
    backend, node, size = cast(Any, learner.backend), planned(learner), planned(learner).trainer.tensor_parallel
    network, kept = backend._policy.policy, list[int]()
    layer = network.decoder.layers[-1]

    def kept_of(forward: Any, *given: Any, **named: Any) -> Any:
        tables = [part.parameter for part in backend._policy.parts]
        with kept_bytes([*tables, network._current.cos_TD, network._current.sin_TD]) as found:
            result = forward(*given, **named)
        kept.append(sum(found.values()))
        return result

    if node.checkpointing is Checkpointing.NONE:
        layer.forward = partial(kept_of, layer.forward)
    peaks = list[int]()
    for _ in range(5):
        with LiveTokens(sizes=(NUM_TOKENS, NUM_TOKENS // size, NUM_TOKENS - 1, NUM_TOKENS * NUM_CHOSEN)) as live:
            log_probs_N, _ = backend.score_tokens(Role.POLICY, one_sequence())
            backend.backward(Role.POLICY, log_probs_N.sum(), share=1.0)
        peaks.append(live.peak)
    if kept:
        # A few numbers of routing are not there.
        rel = 0.003 if node.model.num_experts else 0
        assert kept[0] == pytest.approx(node.rank_tokens * kept_per_token(node, 0), rel=rel)
    peak = max(parts.get(Part.ACTIVATIONS, 0) + parts.get(Part.LOGITS, 0) for parts in step_moments(node).values())
    # The first pass makes megatron-core's buffer, and gloo's thread may hold a tensor for longer: the least of the others counts.
    # Token ids, places and angles are not counted.
    assert peak == pytest.approx(min(peaks[1:]), rel=0.05 if node.model.num_experts else 0.03)


def one_sequence() -> TokenBatch:
    token_ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS + 1,), generator=torch.Generator().manual_seed(0))
    return TokenBatch(
        input_ids_T=token_ids[:-1],
        position_ids_T=torch.arange(NUM_TOKENS),
        cu_seqlens_S=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        max_seqlen=NUM_TOKENS,
        places_N=torch.arange(1, NUM_TOKENS),
        token_ids_N=token_ids[2:],
        temperature_N=torch.ones(NUM_TOKENS - 1),
        num_places=(NUM_TOKENS - 1,),
    )


CASES = [
    ("qwen3", "bfloat16", "none"),
    ("qwen2_tied", "float32", "full"),
    ("qwen3", "float32", "none"),
    ("llama", "bfloat16", "attention"),
    ("qwen3_moe", "bfloat16", "none"),
    ("qwen3_moe", "float32", "full"),
]


def check_bytes(mesh: DeviceMesh, models: dict[str, Path], tensor_parallel: int, cases: Sequence[tuple[str, str, str]]) -> None:
    for kind, dtype, checkpointing in cases:
        choices = {"checkpointing": checkpointing, "micro_batch_tokens": NUM_TOKENS, "kept_layers": 0}
        settings = {"compute_dtype": dtype, "checkpointing": checkpointing, "prefix_sharing": False}
        learner = start(models[kind], mesh=mesh, tensor_parallel=tensor_parallel, choices=choices, **settings)
        check_tags(learner)
        check_step(learner)
        learner.backend.close()


def test_a_rank_has_the_bytes_of_the_plan(mesh: DeviceMesh, models: dict[str, Path]) -> None:
    check_bytes(mesh, models, 1, CASES[:2])


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "tensor_parallel"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_ranks_have_the_bytes_of_the_plan(models: dict[str, Path], num_ranks: int, tensor_parallel: int) -> None:
    # With more ranks, rows of a tiny router are too uneven for the plan of rank 0.
    cases = CASES if num_ranks <= 2 else CASES[:4]
    run_ranks(check_bytes, models, tensor_parallel, cases, num_ranks=num_ranks)


def check_uneven_rows(mesh: DeviceMesh, model: Path) -> None:
    for lora in ({"rank": 5, "type": "dora"}, {"rank": 5, "target_modules": ["q_proj", "down_proj"]}):
        learner = start(model, mesh=mesh, tensor_parallel=1, lora=lora)
        if mesh.get_local_rank() == 0:  # the last rank has fewer moments
            check_tags(learner)
        learner.backend.close()


def test_rows_that_ranks_cannot_share_evenly_are_in_the_plan(tmp_path: Path) -> None:
    model = save_checkpoint(make_model("qwen3", seed=3, vocab_size=VOCAB_SIZE), tmp_path / "model")
    run_ranks(check_uneven_rows, model, num_ranks=2)


def test_clipped_steps_of_adapters_are_those_of_fsdp(mesh: DeviceMesh, models: dict[str, Path], tmp_path: Path) -> None:
    results = []
    for tensor_parallel in (None, 1):
        output = tmp_path / str(tensor_parallel)
        lora = {"rank": 4, "use_dora": True, "rank_pattern": {"1.*.o_proj": 3}}
        learner = start(models["qwen3"], mesh=mesh, tensor_parallel=tensor_parallel, lora=lora, max_grad_norm=0.1)
        facts = steps(learner, 2)
        learner.backend.export_model(output)
        learner.backend.close()
        files = [load_file(output / name) for name in ("adapter/adapter_model.safetensors", "model.safetensors")]
        results.append((facts, *files, (output / "adapter" / "adapter_config.json").read_text()))
    (expected, others, merged, config), (found, adapters, ours, same_config) = results
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=1e-6)
    assert min(step["grad_norm"] for step in expected) > 0.1
    assert config == same_config
    assert adapters.keys() == others.keys() and ours.keys() == merged.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(adapters[name], tensor, rtol=0, atol=2e-6, msg=name)
    for name, tensor in merged.items():
        torch.testing.assert_close(ours[name], tensor, rtol=2**-7, atol=2e-6, msg=name)


def check_experts(mesh: DeviceMesh, model: Path) -> None:
    for lora in (None, {"rank": 4, "target_modules": ["linear_qkv"], "experts": True}):
        learner = start(model, mesh=mesh, tensor_parallel=2, expert_parallel=2, lora=lora)
        check_tags(learner)
        learner.backend.close()


@pytest.mark.long
def test_ranks_with_experts_have_the_bytes_of_the_plan(tmp_path: Path) -> None:
    model = save_checkpoint(make_model(SPARSE, seed=3, vocab_size=VOCAB_SIZE, num_experts=4), tmp_path / "model")
    run_ranks(check_experts, model, num_ranks=4)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_is_of_inputs_or_of_outputs_and_recomputed(mesh: DeviceMesh, models: dict[str, Path], position: str) -> None:
    lora = {"rank": 4, "type": "lora", "dropout": 0.5, "dropout_position": position}
    settings = {"compute_dtype": "float32", "checkpointing": "full"}
    learner = start(models["qwen3"], mesh=mesh, tensor_parallel=1, lora=lora, **settings)
    check_tags(learner)
    backend: Any = learner.backend
    layer, outputs, masks = backend._policy.policy.decoder.layers[0].mlp.linear_fc1, list[Any](), list[torch.Tensor]()
    for part in backend._policy.adapters:
        part.parameter.data.normal_(std=0.1)
    (drop,) = (each for each in (layer.lora._before, layer.lora._after) if isinstance(each, Dropout))
    drop.register_forward_hook(lambda _, inputs, output: masks.append(output / inputs[0]))
    layer.register_forward_hook(lambda _, inputs, output: outputs.append((inputs[0].detach(), output[0].detach())))
    log_probs_N, _ = backend.score_tokens(Role.POLICY, one_sequence())
    backend.backward(Role.POLICY, log_probs_N.sum(), share=1.0)
    assert len(masks) == len(outputs) == 2 and torch.equal(masks[0], masks[1]) and torch.equal(outputs[0][1], outputs[1][1])
    assert masks[0].isclose(torch.zeros(())).float().mean().item() == pytest.approx(0.5, abs=0.05)
    (x, output), mask, (a, b) = outputs[0], masks[0], layer.lora.factors()
    added = (x * mask if position == "pre" else x) @ a.T @ b.T * (32 / 4)
    expected = x @ layer.weight.T + (added if position == "pre" else mask * added)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        scores = [backend.score_tokens(Role.POLICY, one_sequence())[0] for _ in range(2)]
    assert torch.equal(*scores) and len(masks) == 4 and masks[-1].min() == masks[-1].max()
    learner.backend.close()


def test_a_scaling_is_not_rounded_to_the_dtype_of_the_layers(mesh: DeviceMesh, models: dict[str, Path]) -> None:
    lora = {"rank": 3, "alpha": 4, "target_modules": ["q_proj", "o_proj"]}
    learner = start(models["qwen3"], mesh=mesh, tensor_parallel=1, lora=lora, compute_dtype="bfloat16")
    backend: Any = learner.backend
    layer = backend._policy.policy.decoder.layers[0].self_attention.linear_proj
    layer.lora.b["o_proj"].data.normal_()
    (a, b), merged = layer.lora.factors(), torch.empty(layer.weight.shape)
    layer.lora.merge([merged], layer=layer, first_row=0)
    expected = layer.weight.float() + 4 / 3 * b.float() @ a.float()
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    learner.backend.close()
