"""LoRA kernels of an engine that applies one adapter to every token: plain matrix products.

SGLang's kernels look up each token's adapter among several. With a single one, A and B are ordinary matrices, and the product with B adds
to the layer's output in place. Nothing depends on the batch, so CUDA graphs need no data of it.
"""

from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.lora_registry import register_lora_backend
from torch import Tensor

from tasuki.config.trainer_schema import LoraConfig
from tasuki.rollout.arguments import LORA_BACKEND

SLOT = 1
"""Slot of the adapter in SGLang's buffers; slot 0 belongs to requests without one, which tasuki never makes."""


def install_dense_lora(config: LoraConfig) -> None:
    """Lets SGLang find these kernels by the name LORA_BACKEND."""
    register_lora_backend(LORA_BACKEND)(lambda: partial(DenseLora, config=config))


class DenseLora(BaseLoRABackend):
    """Kernels by SGLang's interface. T tokens, rank r; `weights` and buffers have a slot as their first dimension."""

    name = LORA_BACKEND

    def __init__(self, max_loras_per_batch: int, device: torch.device, *, config: LoraConfig, **_: object) -> None:
        super().__init__(max_loras_per_batch, device)
        self._config, self._scales = config, tuple[float, ...]()
        self.batch_info: Any = SimpleNamespace()
        """SGLang sets attributes of it."""

    def of_parts(self, layers: Sequence[str]) -> "DenseLora":
        """The kernels of a module that computes these layers of the checkpoint."""
        made = copy(self)
        made._scales = tuple(map(self._config.scaling_of, layers))
        return made

    def prepare_lora_batch(self, *_: object, **__: object) -> None:
        """Does nothing: there is nothing to prepare."""

    def run_lora_a_sgemm(self, x: Tensor, weights: Tensor, *_: object, **__: object) -> Tensor:
        """[T, in] times A of one or several parts, [parts * r, in]."""
        return x @ weights[SLOT].T

    def run_lora_b_sgemm(self, x: Tensor, weights: Tensor, *_: object, base_output: Tensor, **__: object) -> Tensor:
        """Adds B [out, r] times [T, r] to [T, out]."""
        return base_output.addmm_(x, weights[SLOT].T, alpha=self._scales[0])

    def run_qkv_lora(
        self, x: Tensor, qkv_lora_a: Tensor, qkv_lora_b: Tensor, *, output_offset_cpu: Tensor, base_output: Tensor, **_: object
    ) -> Tensor:
        return self._add_parts(x, qkv_lora_a, qkv_lora_b, output_offset_cpu.tolist(), base_output)

    def run_gate_up_lora(
        self,
        x: Tensor,
        gate_up_lora_a: Tensor,
        gate_up_lora_b: Tensor,
        *,
        output_offset_cpu: Tensor,
        base_output: Tensor,
        **_: object,
    ) -> Tensor:
        return self._add_parts(x, gate_up_lora_a, gate_up_lora_b, output_offset_cpu.tolist(), base_output)

    def _add_parts(self, x: Tensor, a: Tensor, b: Tensor, ends: Sequence[int], base_output: Tensor) -> Tensor:
        """ends: the row of B at which each part begins, and the last one's end."""
        inner, rank, whole = self.run_lora_a_sgemm(x, a), b.shape[-1], b[SLOT]
        for index, (start, end) in enumerate(pairwise(ends)):
            part = inner[:, index * rank : (index + 1) * rank]
            base_output[:, start:end].addmm_(part, whole[start:end].T, alpha=self._scales[index])
        return base_output
