"""Matrix products of a single adapter, against the definition of LoRA."""

from typing import Any

import pytest
import torch
from sglang.srt.lora.backend.lora_registry import get_backend_from_name
from torch import Tensor

from tasuki.config.trainer_schema import LoraConfig
from tasuki.rollout.arguments import LORA_BACKEND
from tasuki.rollout.sglang.adapter import SLOT, DenseLora, install_dense_lora

RANK, ALPHA, TOKENS, WIDTH = 4, 12.0, 5, 16
SCALES = (ALPHA / RANK, 2.0, ALPHA / 3)


@pytest.fixture(scope="module")
def backend() -> DenseLora:
    """The kernels of a module whose second part has another alpha, and whose third has another rank."""
    install_dense_lora(LoraConfig(rank=RANK, alpha=ALPHA, alpha_pattern={"1.b": 8.0}, rank_pattern={"c": 3}))
    create: Any = get_backend_from_name(LORA_BACKEND)
    return create(max_loras_per_batch=2, device=torch.device("cpu"), server_args=None).of_parts(["1.a", "1.b", "1.c"])


def buffer(rows: int, columns: int) -> Tensor:
    """Makes a buffer with SGLang's layout; the other slot is NaN, to show that it does not count."""
    made = torch.full((2, rows, columns), torch.nan)
    made[SLOT] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return made


def test_one_part_is_added_to_the_layers_output(backend: DenseLora) -> None:
    x, base, a, b = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, 24), buffer(RANK, WIDTH), buffer(24, RANK)
    expected = base + ALPHA / RANK * x @ a[SLOT].T @ b[SLOT].T
    found = backend.run_lora_b_sgemm(
        x=backend.run_lora_a_sgemm(x, a), weights=b, output_offset=None, output_offset_cpu=None, base_output=base
    )
    assert found is base
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("ends", [(0, 8, 12, 16), (0, 10, 20)], ids=["q, k and v", "gate and up"])
def test_each_part_has_its_columns_of_a_fused_layers_output(backend: DenseLora, ends: tuple[int, ...]) -> None:
    num_parts = len(ends) - 1
    x, base, a, b = (
        torch.randn(TOKENS, WIDTH),
        torch.randn(TOKENS, ends[-1]),
        buffer(num_parts * RANK, WIDTH),
        buffer(ends[-1], RANK),
    )
    expected = base.clone()
    for index in range(num_parts):
        part, rows = a[SLOT, index * RANK : (index + 1) * RANK], slice(ends[index], ends[index + 1])
        expected[:, rows] += SCALES[index] * x @ part.T @ b[SLOT, rows].T
    offsets = torch.tensor(ends, dtype=torch.int32)
    if num_parts == 3:
        found = backend.run_qkv_lora(
            x=x,
            qkv_lora_a=a,
            qkv_lora_b=b,
            output_offset=offsets,
            output_offset_cpu=offsets,
            max_qkv_out_dim=8,
            base_output=base,
        )
    else:
        found = backend.run_gate_up_lora(
            x=x, gate_up_lora_a=a, gate_up_lora_b=b, output_offset=offsets, output_offset_cpu=offsets, base_output=base
        )
    assert found is base
    torch.testing.assert_close(found, expected)
