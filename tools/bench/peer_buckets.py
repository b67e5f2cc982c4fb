"""Whole weights in flattened buckets, sent to SGLang as CUDA IPC handles, as verl and slime do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from torch.distributed.tensor import DTensor


class Buckets:
    """Buckets of sharded tensors, by name; `full_tensor` gathers each on every rank."""

    def __init__(self, tensors: Mapping[str, DTensor], *, dtype: torch.dtype = torch.bfloat16) -> None:
        """dtype: of the tensors sent."""
        self._tensors, self._dtype = tensors, dtype
        self._sent: Any = None

    def send(self, num_bytes: int, index: int) -> dict[str, Any]:
        """Packs whole tensors of at most `num_bytes` (or one larger tensor) into a new tensor, and returns its handle."""
        collect_handles()
        buckets = self._split(num_bytes)
        bucket = FlattenedTensorBucket(named_tensors=[(name, self.whole(name)) for name in buckets[index]])
        content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        self._sent = bucket
        payload = MultiprocessingSerializer.serialize(content, output_str=True)
        return {"payload": payload, "num_handles": 1, "num_buckets": len(buckets)}

    def send_each(self) -> dict[str, Any]:
        """Gathers all tensors; one handle per tensor."""
        collect_handles()
        self._sent = [(name, self.whole(name)) for name in self._tensors]
        return {"payload": MultiprocessingSerializer.serialize(self._sent, output_str=True), "num_handles": len(self._sent)}

    def whole(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._dtype).full_tensor()

    def forget_sent(self) -> None:
        """Drops the last tensors sent; torch keeps their memory cached."""
        self._sent = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        collect_handles()

    def _split(self, num_bytes: int) -> Sequence[Sequence[str]]:
        buckets: list[list[str]] = [[]]
        size = 0
        for name, tensor in self._tensors.items():
            tensor_bytes = tensor.numel() * self._dtype.itemsize
            if buckets[-1] and size + tensor_bytes > num_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(name)
            size += tensor_bytes
        return buckets


def collect_handles() -> None:
    """Frees IPC memory that engines have closed."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
