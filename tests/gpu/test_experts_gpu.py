"""Experts on a GPU: grouped products against transformers' loop over experts, recomputed layers, and experts spread over two GPUs.

All but the first need `make native`; the last needs two GPUs.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.learner import Learner
from tasuki.trainer.memory import round_blocks
from tasuki.trainer.modules.experts import GroupedExperts, ParallelExperts
from tasuki.trainer.modules.routing import EXPERTS
from tasuki.trainer.wire import Role
from tasuki.wire.stages import MemoryTag
from tests.gpu.conftest import VOCAB_SIZE
from tests.gpu.test_checkpointing_gpu import MAX_TOKENS, samples_of
from tests.integration.learning import learn, metric, start_learner, whole_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


DEVICE, NUM_TOKENS, NUM_CHOSEN = "cuda", 4096, 4
_SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": NUM_CHOSEN,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, head_dim=64, num_experts=64, moe_intermediate_size=512),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=8, intermediate_size=1408),
}
# Relative error in norm. Rounding to bfloat16 changes a value by up to 2^-9, and an expert rounds three times in sequence.
TOLERANCE = 0.01


def experts(kind: str, implementation: str, dtype: torch.dtype) -> Any:
    """Returns the experts of the first layer, with the same weights each time."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.num_hidden_layers = 1
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=implementation)
    found: list[nn.Module] = [module for name, module in model.named_modules() if name.endswith("mlp.experts")]
    return found[0].to(dtype)


def results(module: Any, choice: tuple[Tensor, Tensor], hidden_TH: Tensor, grad_TH: Tensor) -> dict[str, Tensor]:
    """Returns output and gradients."""
    dtype = hidden_TH.dtype if isinstance(module, ParallelExperts) else module.down_proj.dtype
    hidden_TH = hidden_TH.to(dtype, copy=True).requires_grad_()
    indices_TK, weights_TK = choice
    out_TH = module(hidden_TH, indices_TK, weights_TK.to(hidden_TH.dtype))
    out_TH.backward(grad_TH.to(out_TH.dtype))
    assert hidden_TH.grad is not None
    return {
        "out": out_TH.detach(),
        "hidden": hidden_TH.grad,
        "gate_up": _local(module.gate_up_proj.grad),
        "down": _local(module.down_proj.grad),
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_model(kind: str, folder: Path, *, is_one_sided: bool = False) -> None:
    """is_one_sided: routes every token to one of the first two experts."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    if is_one_sided:
        config.num_experts_per_tok = 1
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters() if is_one_sided else ():
        if name.endswith("mlp.gate.weight"):
            parameter.data[1] = -parameter.data[0]
            parameter.data[2:] = 0
    model.save_pretrained(folder)


def test_other_numbers_of_rows_reuse_rounded_blocks() -> None:
    module, random = GroupedExperts(experts("qwen3_moe", "grouped_mm", torch.bfloat16)), torch.Generator().manual_seed(0)
    sizes = torch.randint(NUM_TOKENS, 2 * NUM_TOKENS, (60,), generator=random).tolist()

    def growth() -> int:
        """Bytes that torch reserves for later passes, beside the first ten."""
        torch.cuda.empty_cache()
        reserved = list[int]()
        for num_tokens in sizes:
            hidden_TH = torch.randn(num_tokens, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            chosen_TK = torch.randint(64, (num_tokens, NUM_CHOSEN), device=DEVICE)
            module(hidden_TH, chosen_TK, torch.rand(num_tokens, NUM_CHOSEN, device=DEVICE)).sum().backward()
            reserved.append(torch.cuda.memory_reserved())
        return reserved[-1] - reserved[9]

    by_default = growth()
    round_blocks()
    try:
        assert growth() < by_default / 4
    finally:
        torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:1")


@pytest.mark.parametrize("kind", CONFIGS)
def test_grouped_products_are_those_of_single_experts(kind: str, mesh: DeviceMesh) -> None:
    exact, loop, grouped = (
        experts(kind, *each) for each in (("eager", torch.float32), ("eager", torch.bfloat16), (EXPERTS, torch.bfloat16))
    )
    parallel = ParallelExperts(experts(kind, EXPERTS, torch.float32), mesh)
    generator = torch.Generator(DEVICE).manual_seed(1)
    hidden_TH, grad_TH = (torch.randn(NUM_TOKENS, 1024, generator=generator, device=DEVICE).bfloat16() for _ in range(2))
    # No token selects the last expert.
    scores_TE = torch.rand(NUM_TOKENS, exact.num_experts - 1, generator=generator, device=DEVICE)
    weights_TK, indices_TK = scores_TE.topk(NUM_CHOSEN, dim=-1)
    choice = (indices_TK, weights_TK.bfloat16().float())
    expected = results(exact, choice, hidden_TH, grad_TH)
    for module in (loop, grouped, parallel):
        found = results(module, choice, hidden_TH, grad_TH)
        off = {name: float((found[name].float() - tensor).norm() / tensor.norm()) for name, tensor in expected.items()}
        assert max(off.values()) < TOLERANCE, (type(module), module is grouped, off)
        assert not found["gate_up"][-1].any() and not found["down"][-1].any()


@pytest.mark.parametrize("kind", CONFIGS)
def test_recomputed_experts_have_the_same_gradients(kind: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    gradients: list[dict[str, Tensor]] = []
    for rung in ("none", "attention", "full"):
        learner = start_learner(
            tmp_path, mesh=mesh, checkpointing=rung, compute_dtype="bfloat16", micro_batch_tokens=MAX_TOKENS
        )
        report = learn(learner, Role.POLICY, samples_of(0), config=LossConfig(), max_tokens=MAX_TOKENS)
        assert metric(report, "expert_load_max") >= 1.0
        gradients.append(whole_gradients(learner, Role.POLICY))
        learner.backend.close()
    scale = max(float(gradient.norm()) for gradient in gradients[0].values())
    for found in gradients[1:]:
        for name, expected in gradients[0].items():
            assert float((found[name] - expected).norm()) <= TOLERANCE * (float(expected.norm()) + 1e-2 * scale), name


@pytest.mark.parametrize("is_one_sided", [False, True], ids=["even", "one-sided"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_spread_experts_have_the_gradients_of_gathered_ones(kind: str, is_one_sided: bool, tmp_path: Path) -> None:
    """In the one-sided case the second rank computes no row."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    save_model(kind, tmp_path / "model", is_one_sided=is_one_sided)
    multiprocessing.set_executable(sys.executable)
    multiprocessing.spawn(_rank, (str(tmp_path), is_one_sided), nprocs=2)


def _rank(rank: int, folder: str, is_one_sided: bool) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    pair = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    settings = {"compute_dtype": "bfloat16", "micro_batch_tokens": MAX_TOKENS}
    gathered, *others = (
        start_learner(Path(folder) / "model", mesh=pair, checkpointing=rung, expert_parallel=is_spread, **settings)
        for rung, is_spread in (("none", False), ("none", True), ("full", True))
    )
    expected = _gradients(gathered)
    scale = max(float(gradient.norm()) for gradient in expected.values())
    for learner in others:
        for has_slept in (False, True):
            if has_slept:
                learner.backend.memory.pause_tags([MemoryTag.WEIGHTS])
                learner.backend.memory.resume_tags([MemoryTag.WEIGHTS])
            found = _gradients(learner)
            for name, gradient in expected.items():
                assert float((found[name] - gradient).norm()) <= TOLERANCE * (float(gradient.norm()) + 1e-2 * scale), name
                assert not (is_one_sided and ".experts." in name) or not found[name][2:].any()
    dist.destroy_process_group()


def _gradients(learner: Learner) -> dict[str, Tensor]:
    learn(learner, Role.POLICY, samples_of(0), config=LossConfig(), max_tokens=MAX_TOKENS)
    gradients = whole_gradients(learner, Role.POLICY)
    learner.backend.clear_gradients(Role.POLICY)
    return gradients
